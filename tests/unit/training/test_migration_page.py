"""docs/from_bing_bert.md lists every flag and key of bing_bert, and the launcher accepts each of the flags."""

from tests.support import PROJECT
from training.settings.flags import build_parser

OLD_FLAGS = """
--config-file --cf --output_dir --max_seq_length --max_predictions_per_seq --max_pred --seed --do_lower_case
--local_rank --use_pretrain --refresh_bucket_size --finetune --lr_schedule --lr_offset
--load_training_checkpoint --load_cp --load_checkpoint_id --load_cp_id --job_name --rewarmup --max_steps
--max_steps_per_epoch --print_steps --data_path_prefix --validation_data_path_prefix
--deepspeed_transformer_kernel --stochastic_mode --ckpt_to_save --attention_dropout_checkpoint
--normalize_invertible --gelu_checkpoint --deepspeed_sparse_attention --use_nvidia_dataset
--progressive_layer_drop --deepspeed --deepspeed_config
""".split()
OLD_KEYS = """
name bert_token_file bert_model_file bert_model_config data.flags data.mixed_seq_datasets num_epochs
warmup_proportion learning_rate num_workers async_worker decay_rate decay_step total_training_steps
validation.path vocab_size_or_config_json_file train_batch_size train_micro_batch_size_per_gpu max_grad_norm
bias_correction max_coeff min_coeff fp16 gradient_clipping sparse_attention steps_per_print
wall_clock_breakdown
""".split()


def test_every_old_flag_is_explained_and_known() -> None:
    page = (PROJECT / "docs" / "from_bing_bert.md").read_text()
    known = {option for action in build_parser()._actions for option in action.option_strings}
    for flag in OLD_FLAGS:
        assert f"`{flag}`" in page, flag
        assert flag in known, flag


def test_every_old_key_is_explained() -> None:
    page = (PROJECT / "docs" / "from_bing_bert.md").read_text()
    for key in OLD_KEYS:
        assert f"{key}`" in page, key
