"""Bad input gives one message with the thing, what was found, what was expected and the remedy; exit code 2.

No file is touched. The table stands in tests/integration/bad_input/. Every case runs the command's own main() in this
process, as the process would; a handful runs as real processes too.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import deepspeed_train
from common.console import console
from common.errors import USER_ERROR_EXIT_CODE, UserError, run_command
from data import corpus, inspect, prepare
from nvidia.cpu.amx import avoid_broken_amx
from scripts import compare_unigram, doctor, export_hf, plot_run, predict, two_phases
from tests.integration.bad_input import good, place_cases, tool_cases, training_cases
from tests.integration.bad_input.case import Case, Setup, names
from tests.support import free_port, write_project, write_two_lengths
from tests.support import run_command as run_process
from tests.unit.training.in_process import own_environment

Main = Callable[[Sequence[str] | None], int]
COMMANDS: dict[str, tuple[Main, Callable[[Path], list[str]]]] = {
    "deepspeed_train.py": (deepspeed_train.main, good.train_words),
    "data.prepare": (prepare.main, good.prepare_words),
    "data.corpus": (corpus.main, good.corpus_words),
    "data.inspect": (inspect.main, good.inspect_words),
    "export_hf.py": (export_hf.main, good.export_words),
    "predict.py": (predict.main, good.predict_words),
    "plot_run.py": (plot_run.main, good.plot_words),
    "compare_unigram.py": (compare_unigram.main, good.compare_words),
    "two_phases.py": (two_phases.main, good.phases_words),
    "doctor.py": (doctor.main, good.doctor_words),
}
CASES = [*training_cases.CASES, *place_cases.CASES, *tool_cases.CASES]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def good_setup() -> Generator[Path]:
    """Built once, in a folder that ordinary users can enter."""
    with tempfile.TemporaryDirectory() as folder, own_environment():
        Path(folder).chmod(0o755)
        avoid_broken_amx()
        good.build_good(Path(folder) / "good")
        yield Path(folder) / "good"


@pytest.fixture
def setup(good_setup: Path) -> Generator[Setup]:
    """A copy to break."""
    root = good_setup.parent / "case"
    shutil.copytree(good_setup, root)
    broken = Setup(root, [])
    try:
        yield broken
    finally:
        broken.cleanup.close()
        shutil.rmtree(root)


@contextmanager
def as_process(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """The arguments, environment and user that a separate process would have."""
    with monkeypatch.context() as patch, own_environment():
        patch.setattr(sys, "argv", ["command", *setup.words])
        patch.setattr(console, "enabled", True)
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(setup.environment)
        if setup.user is not None:
            for path in (setup.root, *setup.root.rglob("*")):
                os.chown(path, setup.user, setup.user, follow_symlinks=False)
            setup.cleanup.callback(os.seteuid, 0)
            os.seteuid(setup.user)
        yield


def check_message(output: str, case: Case, root: Path) -> None:
    """One message, with all its parts."""
    assert "Traceback" not in output
    messages = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, output
    message = output[output.index("error: ") :].replace(str(root), "{root}")
    for part in (case.thing, case.found, case.expected, case.remedy):
        assert part in message


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_one_message_code_two_and_no_file_touched(
    case: Case, setup: Setup, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    main, words = COMMANDS[case.command]
    setup.words += words(setup.root)
    case.spoil(setup)
    before = good.snapshot(setup.root)
    capfd.readouterr()
    with as_process(setup, monkeypatch), pytest.raises(SystemExit) as ended:
        run_command(main)
    setup.cleanup.close()
    output = capfd.readouterr().err
    assert ended.value.code == USER_ERROR_EXIT_CODE, output
    check_message(output, case, setup.root)
    assert good.snapshot(setup.root) == before


def deepspeed(num_ranks: int) -> list[str]:
    return ["deepspeed", "--num_gpus", str(num_ranks), "--master_port", str(free_port()), "deepspeed_train.py"]


PROCESSES = {
    "deepspeed_train.py: model JSON, a typo in the model": lambda: [sys.executable, "deepspeed_train.py"],
    "deepspeed_train.py: environment, a port that is taken": lambda: [sys.executable, "deepspeed_train.py"],
    "deepspeed_train.py: checkpoints, another model": lambda: deepspeed(1),
    "deepspeed_train.py: DeepSpeed JSON, a typo": lambda: deepspeed(2),
    "data.prepare: an input without text": lambda: [sys.executable, "-m", "data.prepare"],
}


@pytest.mark.parametrize("name", PROCESSES)
def test_real_processes_do_the_same(name: str, setup: Setup) -> None:
    (case,) = [case for case in CASES if names([case]) == [name]]
    setup.words += COMMANDS[case.command][1](setup.root)
    case.spoil(setup)
    before = good.snapshot(setup.root)
    outcome = run_process([*PROCESSES[name](), *setup.words], env=setup.environment)
    assert outcome.returncode == USER_ERROR_EXIT_CODE
    check_message(outcome.stderr, case, setup.root)
    assert good.snapshot(setup.root) == before


def test_problems_of_both_files_are_reported_together(tmp_path: Path) -> None:
    words = write_project(tmp_path, gradient_cliping=1.0)
    content = json.loads((tmp_path / "model.json").read_text())
    content["bert_model_config"]["hiden_size"] = 32
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="2 problems were found") as caught:
        deepspeed_train.main([*words, "--lr_offset", "0"])
    assert "did you mean 'gradient_clipping'?" in str(caught.value)
    assert "did you mean 'hidden_size'?" in str(caught.value)


def refusal(words: list[str]) -> str:
    with pytest.raises(UserError) as caught, own_environment():
        deepspeed_train.main(words)
    return str(caught.value)


def test_problems_of_the_command_line_are_reported_with_those_of_the_files(tmp_path: Path) -> None:
    words = write_project(tmp_path, gradient_cliping=1.0)
    message = refusal([*words[:4], *words[6:10], "--max_step", "3", "--lr_schedule", "LF", "--max_pred", "x", "--seed"])
    assert message.startswith("6 problems were found")
    for part in (
        "unknown flag '--max_step'; did you mean '--max_steps'?",
        "argument --lr_schedule: invalid choice: 'LF'",
        "argument --max_predictions_per_seq/--max_pred: found 'x'",
        "argument --seed: expected one argument",
        "arguments are required: --output_dir",
        "did you mean 'gradient_clipping'?",
    ):
        assert part in message


def test_problems_of_every_kind_are_reported_in_one_run(tmp_path: Path) -> None:
    """Command line, flags against each other, both JSON files (their own and DeepSpeed's checks), data, places."""
    words = write_project(tmp_path, gradient_cliping=1.0, fp16={"enbled": True}, comms_logger={"enabled": "x"})
    model = json.loads((tmp_path / "model.json").read_text())
    model["bert_model_config"] |= {"hiden_size": 32, "hidden_act": "gellu", "num_hidden_layers": 0}
    model["mixed_seq_training"]["24"]["learning_rate"] = -1
    (tmp_path / "model.json").write_text(json.dumps(model))
    lists = ["--seed", "x", "--masking_rate", "2", "--dynamic_masking", "--time_budget", "soon", "--finetune"]
    lists += ["--max_step", "3", "--batch_schedule", "fast", "--stochastic_mode", "--job_name", "a/b"]
    message = refusal([*words, *lists, "--export_dir", str(tmp_path / "model.json")])
    expected = (
        "argument --seed: found 'x'",
        "unknown flag '--max_step'",
        "argument --masking_rate: found '2'",
        "argument --time_budget: found 'soon'",
        "--finetune loads weights only",
        "--batch_schedule",
        "--stochastic_mode needs --deepspeed_transformer_kernel",
        "job name 'a/b'",
        "--export_dir",
        "did you mean 'hidden_size'?",
        "did you mean 'gelu'?",
        "num_hidden_layers is 0",
        "learning_rate: found -1",
        "did you mean 'gradient_clipping'?",
        "did you mean 'enabled'?",
        "comms_logger.enabled: found 'x', expected true or false",
    )
    for part in expected:
        assert part in message
    assert message.startswith(f"{len(expected)} problems were found")


def test_with_valid_json_files_everything_else_is_checked_despite_a_wrong_flag(tmp_path: Path) -> None:
    words = write_project(tmp_path, sparse_attention={"mode": "fixxed"})
    model = json.loads((tmp_path / "model.json").read_text())
    model["bert_model_config"] |= {"max_position_embeddings": 8, "hidden_size": 2**20}
    (tmp_path / "model.json").write_text(json.dumps(model))
    (tmp_path / "data" / "wiki_training_0.hdf5").write_text("no data")
    message = refusal([*words, "--deepspeed_sparse_attention", "--max_step", "3", "--use_pretrain", "lost"])
    for part in (
        "unknown flag '--max_step'",
        "mode is 'fixxed'",
        "max_position_embeddings is 8",
        "GiB of memory",
        "--use_pretrain: lost is not a folder",
        "wiki_training_0.hdf5: is not an HDF5 file",
        "wiki_test_0.hdf5: validation rows are 24 tokens wide",
    ):
        assert part in message
    assert message.startswith("7 problems were found")


def test_what_depends_on_a_wrongly_given_flag_is_not_checked(tmp_path: Path) -> None:
    """Its default, rows of 512, would lead to three more problems."""
    words = write_project(tmp_path)
    assert refusal([*words, "--max_seq_length", "x"]).startswith("argument --max_seq_length: found 'x'")
    for flag, wrong in (("--max_seq_length", "--max_seq_lenght"), ("--output_dir", "--outputdir")):  # one is required
        misspelt = [wrong if word == flag else word for word in words]
        assert refusal(misspelt) == f"unknown flag {wrong!r}; did you mean {flag!r}?"


def test_swapped_json_files_are_reported_in_one_line(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    model, engine = str(tmp_path / "model.json"), str(tmp_path / "deepspeed.json")
    assert refusal([*words, "--cf", engine, "--deepspeed_config", model]) == (
        f"--cf {engine} is a DeepSpeed JSON and --deepspeed_config {model} is a model JSON; they seem to be swapped; "
        f"exchange them"
    )
    assert refusal([*words, "--cf", engine]).startswith(f"--cf {engine}: is a DeepSpeed JSON, expected a model JSON")
    assert refusal([*words, "--deepspeed_config", model]).startswith(f"--deepspeed_config {model}: is a model JSON")


def test_one_unreadable_file_does_not_hide_other_problems(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    (tmp_path / "deepspeed.json").write_text("{")
    content = json.loads((tmp_path / "model.json").read_text())
    content["bert_token_file"] = "lost.txt"
    content["data"]["mixed_seq_datasets"]["24"] = {"wiki": "gone"}
    (tmp_path / "model.json").write_text(json.dumps(content))
    message = refusal([*words, "--max_seq_length", "24"])
    assert message.startswith("3 problems were found")
    assert "deepspeed.json: is not valid JSON" in message
    assert "lost.txt: no such tokenizer" in message
    assert str(tmp_path / "gone") in message

    write_project(tmp_path)
    (tmp_path / "model.json").write_text("{")
    message = refusal(
        [*words, "--batch_schedule", "fast", "--output_dir", str(tmp_path / "model.json"), "--job_name", "a"]
    )
    assert message.startswith("3 problems were found")
    assert "--batch_schedule" in message
    assert "--output_dir" in message


def test_a_log_folder_that_cannot_be_made_is_reported_with_the_others(tmp_path: Path) -> None:
    words = write_project(tmp_path, gradient_cliping=1.0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "runs").write_text("")
    message = refusal([*words, "--load_training_checkpoint", str(tmp_path / "lost")])
    assert message.startswith("3 problems were found")
    assert f"{tmp_path / 'lost'}: no such folder" in message
    assert f"{tmp_path / 'out' / 'runs'} is a file" in message


def test_a_wrong_prefix_is_one_problem(tmp_path: Path) -> None:
    project = tmp_path / "project"
    words = write_project(project)
    content = json.loads((project / "model.json").read_text())
    (project / "model.json").write_text(json.dumps({**content, "bert_token_file": "tokenizer"}))
    message = refusal([*words, "--data_path_prefix", str(project / "lost")])
    assert message.startswith(f"--data_path_prefix {project / 'lost'}: no such folder")
    assert f"pass --data_path_prefix {project}" in message, "the folder that fits is named"
    assert "tokenizer" not in message
    for wrong in (project / "data", tmp_path):
        message = refusal([*words, "--data_path_prefix", str(wrong)])
        assert message.startswith(f"--data_path_prefix {wrong}: contains none of the model JSON's paths (data")
        assert message.endswith(f"pass --data_path_prefix {project}")
        assert "problems were found" not in message
    for name in ("mine", "yours"):
        shutil.copytree(project / "data", project / "prepared" / name / "data")
    for wrong in ("prepared/mien", "lost"):
        message = refusal([*words, "--data_path_prefix", str(project / wrong)])
        others = [str(project), *(str(project / "prepared" / name) for name in ("mine", "yours"))]
        assert set(message.partition("; pass --data_path_prefix ")[2].split(" or ")) == set(others), "all that fit"
        assert wrong != "prepared/mien" or f"pass --data_path_prefix {others[1]} or" in message, "the nearest is first"


def test_problems_of_all_data_are_reported_together(tmp_path: Path) -> None:
    words = write_two_lengths(tmp_path)
    for name in ("data/wiki_training_0.hdf5", "short/wiki_training_0.hdf5", "data/wiki_test_0.hdf5"):
        (tmp_path / name).write_text("no data")
    message = refusal(words)
    assert message.startswith("3 problems were found")
    assert message.count("is not an HDF5 file") == 3


def test_all_mismatches_of_a_checkpoint_are_reported_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*write_project(tmp_path), "--max_steps", "1"]
    with own_environment():
        assert deepspeed_train.main(words) == 0
    write_project(tmp_path, zero_optimization={"stage": 1})
    monkeypatch.setattr("training.build.build_model", None)
    message = refusal([*words, "--seed", "7", "--no-preln"])
    assert message.startswith("3 problems were found")
    assert "stage 1" in message
    assert "--seed 42" in message
    assert "preln" in message


def test_missing_masks_are_reported_together_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = write_project(tmp_path)
    for split in ("training", "validation"):
        place_cases.shard_without_masks(split)(Setup(tmp_path, []))
    monkeypatch.setattr("training.build.build_model", None)
    message = refusal(words)
    assert message.startswith("2 problems were found")
    assert "wiki_training_8.hdf5: was prepared without masks" in message
    assert "wiki_validation_8.hdf5: was prepared without masks" in message


def test_dynamic_masking_without_a_tokenizer_is_reported_with_other_flags(tmp_path: Path) -> None:
    message = refusal([*write_project(tmp_path), "--dynamic_masking", "--refresh_bucket_size", "2"])
    assert message.startswith("2 problems were found")
    assert "--dynamic_masking needs the tokenizer" in message
    assert "--refresh_bucket_size 2" in message


REQUIRED = {
    "deepspeed_train.py": "--config-file FILE --output_dir DIR",
    "export_hf.py": "--checkpoint DIR --output DIR",
    "plot_run.py": "--output FILE",
    "compare_unigram.py": "--metrics FILE --data DIR",
    "two_phases.py": "--config-file FILE --deepspeed_configs FILE FILE --output_dir DIR --name NAME",
    "predict.py": "--model DIR",
}


@pytest.mark.parametrize("command", REQUIRED)
def test_help_shows_required_flags_without_brackets(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without brackets, although parsing continues without them."""
    with pytest.raises(SystemExit) as ended:
        COMMANDS[command][0](["--help"])
    assert ended.value.code == 0
    assert f" [-h] {REQUIRED[command]} " in " ".join(capsys.readouterr().out.split())


def test_the_good_setup_is_good(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages of the cases come from what they break, not from the setup."""
    for command, (main, words) in COMMANDS.items():
        if command in ("data.corpus", "doctor.py", "two_phases.py"):
            continue  # a minute; this machine's own state; its second phase is missing
        setup.words[:] = words(setup.root) + (["word1 [MASK]"] if command == "predict.py" else [])
        with as_process(setup, monkeypatch):
            assert main(None) == 0, command


def test_the_table_is_large_enough() -> None:
    assert len(CASES) >= 60
    assert {case.command for case in CASES} == COMMANDS.keys()
    assert len(set(names(CASES))) == len(CASES)


def test_what_was_expected_differs_from_what_was_found() -> None:
    assert [name for name, case in zip(names(CASES), CASES, strict=True) if case.expected in (case.found, "")] == []
