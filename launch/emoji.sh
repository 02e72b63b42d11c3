#!/usr/bin/env bash
# Text to image: trains a small UNet in SDXL's structure on the emoji of a font and their Unicode
# names, folded over 2 pipeline ranks. Then draws the loss curve and emoji for prompts.
# Needs no GPU and no download, but the Debian or Ubuntu package fonts-noto-color-emoji.
#
#   bash launch/emoji.sh                            into runs/emoji
#   PULSE_RUN_DIR=/tmp/emoji bash launch/emoji.sh
#   PULSE_TRAIN_ITERS=24 PULSE_RANKS=1 bash launch/emoji.sh   smoke test, draws noise
#   PULSE_EMOJI_FONT=NotoColorEmoji.ttf bash launch/emoji.sh    font at another path
#
# An interrupted run continues from its last checkpoint at the next start. A finished run starts
# over. The script deletes only files that it wrote itself.
set -euo pipefail
run_dir=$(realpath -m "${PULSE_RUN_DIR:-runs/emoji}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
source launch/training.sh
pulse_setup

num_iters=${PULSE_TRAIN_ITERS:-1000}
num_steps=$((num_iters < 25 ? num_iters : 25))
model=(
    --pulse-backbone sdxl-tiny
    --pulse-option sample_size=32
    --pulse-option in_channels=3           # pixel space, no autoencoder
    --pulse-option out_channels=3
    --pulse-option block_out_channels=16,32,64
    --pulse-option layers_per_block=1
    --pulse-option transformer_depth=0,0,1 # attention at 8x8 only: small steps, and many of them
    --pulse-option mid_transformer_depth=1
    --pulse-option num_heads=4
    --pulse-option context_length=12       # the longest name has 11 words, plus the end token
    --pulse-option cross_attention_dim=64
    --pulse-option pooled_dim=64
)
training=(
    --pulse-data "captions:$run_dir/images"
    --micro-batch-size 4
    --global-batch-size 16
    --lr 2e-3
    --lr-warmup-iters $((num_iters / 12))
    --lr-decay-style cosine
    --min-lr 0
    --adam-beta2 0.99
    --weight-decay 0.01
    --clip-grad 1.0
    --pulse-ema-decay 0.995
    --eval-interval 100
    --eval-iters 8                         # 128 of the 141 validation emoji
)

pulse_choose_ranks 2
pulse_begin emoji "$run_dir" "$(echo "$num_iters ${model[*]} ${training[*]}" | cksum)" \
    images loss.png loss.json emoji.png report.json
if ! [ -d "$run_dir/images" ]; then
    .venv/bin/pulse data emoji --to "$run_dir/images" \
        ${PULSE_EMOJI_FONT:+--font "$PULSE_EMOJI_FONT"}
fi
pulse_train emoji "$run_dir" "$num_iters" "${model[@]}" "${training[@]}"
echo "Drawing the loss curve and sampling ..."
.venv/bin/pulse curve --tensorboard-dir "$run_dir/tensorboard" -o "$run_dir/loss.png" \
    --title "UNet on captioned emoji, folded over $num_ranks ranks"
.venv/bin/pulse sample --load "$run_dir/checkpoints" -o "$run_dir/emoji.png" \
    --prompt "grinning face" --prompt "blue heart" --prompt "large red square" \
    --per-class 8 --steps "$num_steps" --guidance 4 --json "$run_dir/report.json"
pulse_end emoji "$run_dir"
echo
echo "Loss curve: $run_dir/loss.png"
echo "Emoji:      $run_dir/emoji.png (one row per prompt)"
