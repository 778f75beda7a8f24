"""Describe a folder of shards: `python -m data.inspect DIR`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.console import console
from common.errors import Problems, UserError, run_command
from common.files import check_folder_to_write, write_atomically
from common.help import HelpFormatter, Parser
from data.shards.dataset import open_dataset
from data.shards.folder import list_shards, split_of
from data.shards.reader import ShardFile
from data.shards.report import Description, Preparation, describe, render, report_files
from data.shards.schema import SPLITS, Split
from data.tokenizer import BertTokenizer, load_tokenizer


def inspect_folder(
    folder: Path,
    tokenizer: BertTokenizer | None,
    *,
    verify: bool = False,
    preparation: Mapping[Split, Preparation] | None = None,
) -> list[Description]:
    """Describe every split in the folder; `preparation`: of each, if data.prepare has just made it."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Give one with .hdf5 shards.")
    files = list_shards(folder)
    if not files:
        raise UserError(
            f"{folder}: has no .hdf5 file. `python -m data.prepare` writes shards to <output_dir>/<length>."
        )
    names = {split_of(path) for path in files}
    splits: list[Split] = [split for split in SPLITS if split in names]
    if not splits:
        raise UserError(f"{folder}: no file has {' or '.join(SPLITS)} in its name. Rename them, as in training_0.hdf5.")
    first = ShardFile(files[0])
    first.close()
    found = []
    for split in splits:
        dataset = open_dataset(
            [folder],
            split=split,
            max_seq_length=first.layout.max_seq_length,
            max_predictions_per_seq=max(first.layout.max_predictions_per_seq, 1),
            verify=verify,
        )
        found.append(describe(dataset, split, tokenizer, None if preparation is None else preparation[split]))
        dataset.close()
    return found


def find_tokenizer(folder: Path, given: Path | None) -> BertTokenizer | None:
    """The given tokenizer, or else the one next to the prepared shards, if there is one."""
    if given is not None:
        return load_tokenizer(given)
    beside = next((path for path in (folder / "tokenizer", folder.parent / "tokenizer") if path.is_dir()), None)
    return None if beside is None else load_tokenizer(beside)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m data.inspect",
        description="Describe a folder of HDF5 shards, NVIDIA's or ours: counts, fill, tokens, sample rows, warnings.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="folder with .hdf5 shards")
    add("--vocab_file", type=Path, metavar="FILE", help="tokenizer (default: the one next to the shards)")
    add("--verify_data", action="store_true", help="compare every file with its digest in the manifest")
    add("--report_dir", type=Path, metavar="DIR", help="folder to write report.md, report.json and lengths.svg to")
    arguments = parser.parse_args(argv)
    if arguments.report_dir is not None:
        problems = Problems()
        check_folder_to_write(arguments.report_dir, "--report_dir", problems)
        problems.raise_if_any()
    tokenizer = find_tokenizer(arguments.folder, arguments.vocab_file)
    found = inspect_folder(arguments.folder, tokenizer, verify=arguments.verify_data)
    console.say(render(found))
    for description in found:
        for warning in description.warnings:
            console.warn(f"{description.split}: {warning}")
    if arguments.report_dir is not None:
        arguments.report_dir.mkdir(parents=True, exist_ok=True)
        for name, content in report_files(found).items():
            write_atomically(arguments.report_dir / name, content)
        console.say(f"{arguments.report_dir}: report.md, report.json, lengths.svg")
    return 0


if __name__ == "__main__":
    run_command(main)
