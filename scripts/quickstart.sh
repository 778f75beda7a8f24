#!/usr/bin/env bash
# From nothing to a BERT that predicts masked words, on a laptop: text, tokenizer, shards, training, export, predictions.
# Run again, it resumes. --fresh starts over; --steps N stops training after N steps.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/install.sh"

output=outputs/quickstart
max_steps=()
case "${1:-}" in
    "") ;;
    --fresh) rm -rf data/corpus data/packages.csv data/hdf5/64 data/hdf5/128 data/hdf5/tokenizer "$output" ;;
    --steps) max_steps=(--max_steps "$2") ;;
    *) echo "usage: scripts/quickstart.sh [--fresh | --steps N]" >&2; exit 2 ;;
esac

install_requirements requirements.txt
started=$SECONDS

echo "== 1. Text: the documentation of Python and of the installed packages"
python -m data.corpus --output data/corpus --labelled data/packages.csv

echo "== 2. Tokenizer and shards"
python -m data.prepare --input data/corpus --output_dir data/hdf5 --vocab_size 4096 --objective mlm --short_seq_prob 0 \
    --max_seq_length 64 --max_predictions_per_seq 10 --dupe_factor 1 --seed 42 --workers 2
python -m data.prepare --input data/corpus --output_dir data/hdf5 --vocab_file data/hdf5/tokenizer \
    --max_seq_length 128 --max_predictions_per_seq 20 --dupe_factor 1 --seed 42 --workers 2  # pairs, for bert_base.json

echo "== 3. Training"
python deepspeed_train.py --cf configs/quickstart.json --deepspeed_config configs/ds_quickstart.json \
    --max_seq_length 64 --max_predictions_per_seq 20 --dynamic_masking --masking_rate 0:0.30,3.7M:0.15 \
    --data_path_prefix data --use_nvidia_dataset --output_dir "$output" --job_name quickstart --lr_schedule wsd \
    --probe data/packages.csv --print_steps 50 --validate_every_steps 625 --save_every_steps 250 --keep_last 2 \
    --export_dir "$output/huggingface" ${max_steps[@]+"${max_steps[@]}"}  # bash 3, on a Mac, takes an empty array for unset

echo "== 4. What it has learned"
python scripts/plot_run.py "$output/runs/quickstart" --output "$output/loss.png"
python scripts/predict.py --model "$output/huggingface" \
    "returns a new [MASK] with the same elements ." \
    "raises a type [MASK] if the argument is not a string ." \
    "the [MASK] of the array must be an integer ."
python scripts/compare_unigram.py --metrics "$output/runs/quickstart/metrics.jsonl" \
    --data data/hdf5/64 --max_seq_length 64 --max_predictions_per_seq 10

cat <<END

Done in $((SECONDS - started)) s, without the installation. Results:
  $output/huggingface            the model, for stock transformers
  $output/loss.png               a plot of the loss
  $output/runs/quickstart        TensorBoard: tensorboard --logdir $output/runs
  $output/saved_models           checkpoints
  data/hdf5                                 the shards and the tokenizer, where bert_base.json expects them
END
