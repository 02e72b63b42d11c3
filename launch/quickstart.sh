#!/usr/bin/env bash
# Trains a class-conditional U-ViT on real MNIST digits, folded over 4 pipeline ranks. Then draws
# the loss curve and a grid of generated digits, and scores them. Needs no GPU and no download.
#
#   bash launch/quickstart.sh                        into runs/quickstart
#   PULSE_RUN_DIR=/tmp/digits bash launch/quickstart.sh
#   PULSE_TRAIN_ITERS=24 PULSE_RANKS=2 bash launch/quickstart.sh   smoke test, draws noise
#
# An interrupted run continues from its last checkpoint at the next start. A finished run starts
# over. The script deletes only files that it wrote itself.
set -euo pipefail
run_dir=$(realpath -m "${PULSE_RUN_DIR:-runs/quickstart}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
source launch/training.sh
pulse_setup

num_iters=${PULSE_TRAIN_ITERS:-1200}
num_steps=$((num_iters < 25 ? num_iters : 25))
model=(
    --pulse-backbone uvit-tiny
    --pulse-option in_channels=1
    --pulse-option image_size=16 # a quarter of the pixels of 28x28, and still legible
    --pulse-option patch_size=4  # 16 tokens: small steps, so that many fit into the training time
    --pulse-option embed_dim=128
    --pulse-option depth=6       # 9 layers; a fold over 4 ranks has 8 stages
)
training=(
    --pulse-data mnist
    --micro-batch-size 8
    --global-batch-size 32       # 4 microbatches, one per rank; 1200 steps see 38,400 digits
    --lr 3e-3                    # high for Adam, stable at this size with warm-up and clipping
    --lr-warmup-iters $((num_iters / 12))
    --lr-decay-style cosine
    --min-lr 0
    --adam-beta2 0.99            # few steps: the second moment must follow quickly
    --weight-decay 0.01
    --clip-grad 1.0
    --pulse-ema-decay 0.995      # EMA over the last 200 steps, at a low learning rate
    --eval-interval 200
    --eval-iters 4
)

pulse_choose_ranks 4
pulse_begin quickstart "$run_dir" "$(echo "$num_iters ${model[*]} ${training[*]}" | cksum)" \
    loss.png loss.json digits.png report.json
pulse_train quickstart "$run_dir" "$num_iters" "${model[@]}" "${training[@]}"
echo "Drawing the loss curve and sampling ..."
.venv/bin/pulse curve --tensorboard-dir "$run_dir/tensorboard" -o "$run_dir/loss.png" \
    --title "U-ViT on MNIST digits, folded over $num_ranks ranks"
# Of guidance scales 1, 2 and 3, 3 gives the clearest digits after so short a training.
.venv/bin/pulse sample --load "$run_dir/checkpoints" -o "$run_dir/digits.png" \
    --classes 0-9 --per-class 10 --steps "$num_steps" --guidance 3 --score mnist --json "$run_dir/report.json"
pulse_end quickstart "$run_dir"
echo
echo "Loss curve: $run_dir/loss.png"
echo "Digits:     $run_dir/digits.png (one row per digit; the score is above)"
