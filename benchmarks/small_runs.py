"""Files for a run of the launcher on made-up rows: a shard, a model JSON and a DeepSpeed JSON."""

from pathlib import Path

from tests.support import make_rows, write_json, write_nvidia_shard


def write_run(
    folder: Path, hidden_size: int, layers: int, stage: int,
    *, rows: int, width: int, predictions: int, vocab: int, steps: int, batch: int,
) -> list[str]:  # fmt: skip
    """The launcher's arguments for what is written below `folder`. Row lengths vary as usual."""
    write_nvidia_shard(folder / "data" / "a_training_0.hdf5", make_rows(rows, width, predictions, seed=1, vocab=vocab))
    model = {
        "name": "benchmark",
        "bert_model_config": {
            "vocab_size": vocab,
            "hidden_size": hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": max(1, hidden_size // 64),
            "intermediate_size": 4 * hidden_size,
        },
        "data": {"mixed_seq_datasets": {str(width): {"rows": "data"}}},
        "mixed_seq_training": {
            str(width): {
                "num_epochs": 100,
                "warmup_proportion": 0.0,
                "learning_rate": 1e-4,
                "total_training_steps": steps,
            }
        },
    }
    deepspeed = {"train_batch_size": batch, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    return [
        *("--cf", str(write_json(folder / "model.json", model))),
        *("--deepspeed_config", str(write_json(folder / "deepspeed.json", deepspeed))),
        *("--output_dir", str(folder / "out"), "--data_path_prefix", str(folder), "--keep_last", "1"),
        *("--max_seq_length", str(width), "--max_predictions_per_seq", str(predictions)),
    ]
