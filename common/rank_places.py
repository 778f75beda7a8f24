"""On which devices a `deepspeed` command starts its ranks, and the same command without one of them."""

import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from common.errors import UserError

COUNT_FLAGS = ("--num_gpus", "--num_accelerators")
HOSTFILE_FLAGS = ("--hostfile", "-H")
INCLUDE_FLAGS = ("--include", "-i")
EXCLUDE_FLAGS = ("--exclude", "-e")
SCRIPT_SUFFIX = ".py"


@dataclass(frozen=True)
class RankPlaces:
    """`command` and the (host, slot) of each of its ranks in order; hosts are None where only a number is given."""

    command: list[str]
    places: list[tuple[str | None, int]]

    @classmethod
    def of(cls, command: list[str]) -> "RankPlaces":
        """UserError where the command does not say how many ranks it starts."""
        count = _value(command, COUNT_FLAGS)
        hostfile, include = _value(command, HOSTFILE_FLAGS), _value(command, INCLUDE_FLAGS)
        if hostfile is None and include is not None:
            return cls(command, _listed(include))
        if hostfile is None and count is not None and count.isdigit():
            return cls(command, [(None, slot) for slot in range(int(count))])
        if hostfile is None:
            raise UserError(
                f"--fewer_ranks needs a command with {' or '.join(COUNT_FLAGS)} and a number, with --include, or with "
                f"--hostfile"
            )
        slots = _read_hostfile(Path(hostfile))
        if count is not None and count.isdigit():
            slots = dict.fromkeys(slots, int(count))
        nodes = _value(command, ("--num_nodes",))
        hosts = list(slots)[: int(nodes)] if nodes is not None and nodes.isdigit() else list(slots)
        places: list[tuple[str | None, int]] = [(host, slot) for host in hosts for slot in range(slots[host])]
        if include is not None:
            places = [place for place in _filled(include, slots) if place in places]
        left_out = _filled(_value(command, EXCLUDE_FLAGS) or "", slots)
        return cls(command, [place for place in places if place not in left_out])

    def without(self, rank: int | None) -> "RankPlaces":
        """The same with one rank less: `rank` where it is known, else the last."""
        if len(self.places) == 1:
            return self
        index = rank if rank is not None and rank < len(self.places) else len(self.places) - 1
        places = [place for number, place in enumerate(self.places) if number != index]
        is_counted = self.places[0][0] is None
        rest = _without_flags(self.command, (*COUNT_FLAGS, *INCLUDE_FLAGS, *EXCLUDE_FLAGS, "--num_nodes"))
        words = [COUNT_FLAGS[0], str(len(places))] if is_counted else [INCLUDE_FLAGS[0], _written(places)]
        script = _own_words(rest)  # the launcher's own name may stand anywhere before it, as in `nice deepspeed …`
        return RankPlaces([*rest[:script], *words, *rest[script:]], places)


def _own_words(command: list[str]) -> int:
    """How many words come before the training script, whose flags are its own."""
    return next((index for index, word in enumerate(command) if word.endswith(SCRIPT_SUFFIX)), len(command))


def _value(command: list[str], flags: tuple[str, ...]) -> str | None:
    """Of the first of `flags`, given as its next word or joined to it."""
    words = command[: _own_words(command)]
    for word, following in zip_longest(words, words[1:]):
        if word in flags:
            return following
        if _is_joined(word, flags):
            return word.partition("=")[2]
    return None


def _is_joined(word: str, flags: tuple[str, ...]) -> bool:
    return word.startswith(tuple(f"{flag}=" for flag in flags))


def _without_flags(command: list[str], flags: tuple[str, ...]) -> list[str]:
    kept, index, end = [], 0, _own_words(command)
    while index < end:
        if command[index] in flags:
            index += 2
            continue
        if not _is_joined(command[index], flags):
            kept.append(command[index])
        index += 1
    return [*kept, *command[end:]]


def _read_hostfile(path: Path) -> dict[str, int]:
    """`worker-0 slots=8`, a line a machine."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--hostfile {path}: cannot be read ({error}); --fewer_ranks needs it") from None
    found = [re.match(r"(\S+)\s+slots=(\d+)", line.strip()) for line in lines if not line.strip().startswith("#")]
    slots = {match[1]: int(match[2]) for match in found if match}
    if not slots:
        raise UserError(f"--hostfile {path}: names no machine; expected lines such as `worker-0 slots=8`")
    return slots


def _listed(text: str) -> list[tuple[str | None, int]]:
    """The places of `host:0,2@other:1`; every host must say its slots."""
    places: list[tuple[str | None, int]] = []
    for part in text.split("@"):
        host, _, slots = part.partition(":")
        if not re.fullmatch(r"\d+(,\d+)*", slots):
            raise UserError(f"--include {text}: does not say the slots of {host}; write for example localhost:0,1,2,3")
        places += [(host, int(slot)) for slot in slots.split(",")]
    return places


def _filled(text: str, slots: dict[str, int]) -> list[tuple[str | None, int]]:
    """The same, where a host without slots means all that the hostfile gives it."""
    if not text:
        return []
    parts = [part if ":" in part else f"{part}:{_all_slots(slots.get(part, 0))}" for part in text.split("@")]
    return _listed("@".join(part for part in parts if not part.endswith(":")))


def _all_slots(count: int) -> str:
    return ",".join(map(str, range(count)))


def _written(places: list[tuple[str | None, int]]) -> str:
    hosts = dict.fromkeys(str(host) for host, _ in places)
    return "@".join(f"{host}:{','.join(str(slot) for other, slot in places if other == host)}" for host in hosts)
