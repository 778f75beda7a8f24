"""What becomes of each top-level key of the DeepSpeed JSON: no key that the user gave is ignored silently."""

from typing import Any

from training.engine.json_blocks import ActivationBlock

# Keys that are refused if they are on, and what to use instead. DeepSpeed 0.19 has removed some of these features.
REFUSED_KEYS = {
    "scheduler": "the learning rate comes from the model JSON and --lr_schedule; remove the block",
    "amp": "apex is not used; use fp16 or bf16",
    "curriculum_learning": "DeepSpeed's data pipeline is not used; remove the block",
    "data_efficiency": "DeepSpeed's data pipeline is not used; remove the block",
    "elasticity": "DeepSpeed has removed it; a run resumes with any number of ranks without it; remove the block",
    "nebula": "DeepSpeed has removed it; checkpoints are written by this project; remove the block",
    "compression_training": "DeepSpeed has removed its compression library; remove the block",
    "sparse_gradients": "DeepSpeed has removed it, and the gradients of this model are dense; remove the key",
}
# Keys that our own code reads.
OUR_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer"),
    *("progressive_layer_drop", "sparse_attention", "activation_checkpointing"),
)
# Keys that change nothing in a run, and what does.
KEYS_WITHOUT_EFFECT = {
    "autotuning": "pass --find_micro_batch",
    "compile": "pass --compile, which compiles the feed-forward half of each block",
    "dataloader_drop_last": "DeepSpeed's data loader is not used",
    "datastates_ckpt": "checkpoints are written by this project",
    "disable_allgather": "DeepSpeed itself does not use it",
    "expert_parallel": "the model has no experts; use zero_optimization to distribute memory",
    "hybrid_engine": "it is for reinforcement learning from human feedback",
    "pipeline": "the model is not split into stages; use zero_optimization to distribute memory",
    "seq_parallel_communication_data_type": "there is no sequence parallelism; see communication_data_type",
    "use_data_before_expert_parallelism": "the model has no experts",
    "vocabulary_size": "the tokenizer or bert_model_config.vocab_size determines the number of tokens",
    "weight_quantization": "it is for inference",
}


def state_of(key: str) -> str:
    """The word for it in docs/configuration.md."""
    if key in REFUSED_KEYS:
        return "refused"
    if key in KEYS_WITHOUT_EFFECT:
        return "no effect"
    return "ours" if key in OUR_KEYS else "DeepSpeed"


def is_off(value: Any) -> bool:
    """Whether a block or value turns its feature off explicitly."""
    return value is None or value is False or (isinstance(value, dict) and value.get("enabled") is False)


def find_ignored(content: dict[str, Any]) -> list[str]:
    """One line for each given key that has no effect, with what does; none for a key that is off or empty."""
    lines = [
        f"{key!r} has no effect here: {instead}"
        for key, instead in KEYS_WITHOUT_EFFECT.items()
        if key in content and _requests_something(content[key])
    ]
    zero = content.get("zero_optimization", {})
    has_nvme = any((zero.get(part) or {}).get("device") == "nvme" for part in ("offload_optimizer", "offload_param"))
    if content.get("aio") and not has_nvme:
        lines.append("'aio' has no effect here: it is for zero_optimization's offloading to the device 'nvme'")
    return lines


def _requests_something(value: Any) -> bool:
    if isinstance(value, dict) and not is_off(value):
        return any(_requests_something(part) for part in value.values())
    return not is_off(value)


def checkpoint_layers(content: dict[str, Any], num_layers: int) -> int | None:
    """Layers that the block activation_checkpointing asks to recompute together.

    0: the default number. None: the block is absent, or asks for nothing.
    """
    block = ActivationBlock(**content.get("activation_checkpointing", {}))
    if block.number_checkpoints:
        return -(-num_layers // min(block.number_checkpoints, num_layers))
    return 0 if block.wanted_options() else None
