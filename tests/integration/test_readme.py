"""The README's commands are run, not trusted: word for word, in a copy of the project."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
import transformers

from tests.support import PROJECT, free_port

# Commands that do not end by themselves: each is stopped once it has printed this text.
ENDLESS = {
    "tensorboard --logdir outputs/runs": "http://",
    "python deepspeed_train.py --cf configs/continue_pretraining.json": "checkpoints ",
    "deepspeed deepspeed_train.py": "checkpoints ",  # its steps are taken by a slow test
    "deepspeed --hostfile hostfile": "checkpoints ",
}
# Run by tests of their own.
ELSEWHERE = {"scripts/quickstart.sh", "scripts/test.sh"}
TIMEOUT = 400


def readme_commands() -> list[str]:
    """The indented blocks that are commands. The map of the files is indented too, and recognised by its arrow."""
    blocks = (PROJECT / "README.md").read_text().split("\n\n")
    lines = [line for block in blocks if block.startswith("    ") and "→" not in block for line in block.splitlines()]
    return [line.strip() for line in lines]


def copy_project(target: Path) -> None:
    """The tracked files and those about to be, with this environment as the copy's own."""
    list_files = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(list_files, cwd=PROJECT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (PROJECT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, target / name)
    (target / ".venv").symlink_to(Path(sys.prefix), target_is_directory=True)


def write_text(folder: Path) -> None:
    """A few hundred short documents, so that BERT-base gets through a step in seconds."""
    folder.mkdir()
    words = "the list of a function returns new value from old string with this name and that number".split()
    documents = []
    for number in range(400):
        sentences = [
            " ".join(words[(number * 7 + line * 3 + place * (line + 1)) % len(words)] for place in range(6))
            for line in range(3)
        ]
        documents.append("\n".join(f"{sentence} {number}." for sentence in sentences))
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n")


def write_roberta(folder: Path, text: Path) -> None:
    """A small RoBERTa with random weights, as stock transformers writes one."""
    words = tokenizers.ByteLevelBPETokenizer()
    words.train([str(text)], vocab_size=400, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    roles = {"bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>"}
    others = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, **roles, **others).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.RobertaConfig(vocab_size=400, max_position_embeddings=514, type_vocab_size=1, **sizes)
    transformers.RobertaForMaskedLM(config).save_pretrained(folder)


def stand_in_for_the_quickstart(folder: Path) -> None:
    """Where the quickstart puts its shards, put those just prepared."""
    shutil.copytree(folder / "data" / "mine" / "hdf5", folder / "data" / "hdf5")


def run_until(command: str, expected: str | None, cwd: Path) -> str:
    """Run in a shell to its end, or until `expected` is printed; what it printed so far."""
    log = cwd / "log.txt"
    environment = {**os.environ, "PATH": f"{cwd / '.venv' / 'bin'}:{os.environ['PATH']}"}
    local = f"--master_addr 127.0.0.1 --master_port {free_port()}"
    if command.startswith("deepspeed "):  # the default port may be taken, and a test machine has no ssh server
        command = command.replace("deepspeed ", f"deepspeed --no_ssh_check {local} ", 1)
    with log.open("w") as stream:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=cwd, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    deadline = time.monotonic() + TIMEOUT
    try:
        while process.poll() is None:
            if expected is not None and expected in log.read_text():
                return log.read_text()
            assert time.monotonic() < deadline, f"{command}\ntook longer than {TIMEOUT} s\n{log.read_text()[-3000:]}"
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    printed = log.read_text()
    assert process.returncode == 0, f"{command}\n{printed[-3000:]}"
    assert expected is None or expected in printed, f"{command}\n{printed[-3000:]}"
    return printed


def test_every_command_works(tmp_path: Path) -> None:
    copy_project(tmp_path)
    write_text(tmp_path / "my_text")
    write_roberta(tmp_path / "roberta-base", tmp_path / "my_text" / "text.txt")
    (tmp_path / "hostfile").write_text("localhost slots=1\n")
    commands = [command for command in readme_commands() if command not in ELSEWHERE]
    assert len(commands) >= 8
    for command in commands:
        expected = next((text for start, text in ENDLESS.items() if command.startswith(start)), None)
        run_until(command, expected, tmp_path)
        if "data.prepare" in command and "data/mine" in command:
            stand_in_for_the_quickstart(tmp_path)
    assert (tmp_path / "outputs" / "saved_models" / "bert_base" / "step_00000003" / "manifest.json").is_file()
    assert list((tmp_path / "outputs" / "runs" / "bert_base").glob("events.out.tfevents.*"))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "python"])
def test_the_launchers_own_line_takes_honest_steps(launcher: str, tmp_path: Path) -> None:
    copy_project(tmp_path)
    write_text(tmp_path / "my_text")
    run_until(next(line for line in readme_commands() if "data.prepare" in line), None, tmp_path)
    stand_in_for_the_quickstart(tmp_path)
    line = next(line for line in readme_commands() if line.startswith("deepspeed deepspeed_train.py"))
    words = f"{launcher} {line.split(' ', 1)[1]} --max_steps 3 --print_steps 1"
    printed = run_until(words, None, tmp_path)
    assert "step 3/3" in printed
    assert (tmp_path / "outputs" / "saved_models" / "train_test" / "step_00000003" / "manifest.json").is_file()


def test_quickstart_goes_the_whole_road_and_goes_on(tmp_path: Path) -> None:
    """With a megabyte of the text, which is there already; the slow test below makes it all."""
    copy_project(tmp_path)
    run_until("python -m data.corpus --output data/corpus --max_mb 1", None, tmp_path)
    printed = run_until("scripts/quickstart.sh --steps 20", None, tmp_path)
    assert "unigram cross entropy" in printed
    assert (tmp_path / "outputs" / "quickstart" / "loss.png").stat().st_size > 10_000
    assert (tmp_path / "outputs" / "quickstart" / "huggingface" / "model.safetensors").is_file()
    objectives = {
        length: json.loads((tmp_path / "data" / "hdf5" / length / "manifest.json").read_text())["settings"]["objective"]
        for length in ("64", "128")
    }
    assert objectives == {"64": "mlm", "128": "nsp"}  # only bert_base.json has a sentence head
    again = run_until("scripts/quickstart.sh --steps 20", None, tmp_path)
    assert "already built" in again
    assert "finished already, at step 20" in again


@pytest.mark.slow
def test_quickstart_learns(tmp_path: Path) -> None:
    copy_project(tmp_path)
    printed = run_until("scripts/quickstart.sh", None, tmp_path)
    gain = next(line for line in printed.splitlines() if line.startswith("gain of the model over the unigram"))
    assert float(gain.split()[-2]) >= 2.6


def test_ci_calls_the_test_command() -> None:
    assert "scripts/test.sh" in (PROJECT / ".ci" / "run").read_text().splitlines()
    assert {"scripts/quickstart.sh", "scripts/test.sh"} <= set(readme_commands())
