#!/usr/bin/env bash
# Trains a class-conditional U-ViT on real MNIST digits, folded over 4 pipeline ranks, then draws
# its loss curve and a grid of digits it made, and scores them. Needs no GPU and no download.
#
#   bash launch/quickstart.sh                        into runs/quickstart
#   PULSE_RUN_DIR=/tmp/digits bash launch/quickstart.sh
#
# Interrupted, it goes on from its last checkpoint when it is started again; once finished, it
# starts anew. It only ever deletes what it wrote itself.
set -euo pipefail
run_dir=$(realpath -m "${PULSE_RUN_DIR:-runs/quickstart}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
pulse_setup

num_iters=${PULSE_TRAIN_ITERS:-1200}
model=(
    --pulse-backbone uvit-tiny
    --pulse-option in_channels=1
    --pulse-option image_size=16 # a quarter of the pixels of 28x28, and still legible
    --pulse-option patch_size=4  # 16 tokens: small steps, and many of them, make good digits
    --pulse-option embed_dim=128
    --pulse-option depth=6       # 9 layers; a fold over 4 ranks has 8 stages
)
training=(
    --pulse-data mnist
    --micro-batch-size 8
    --global-batch-size 32       # 4 microbatches, as many as ranks; 1200 steps see 38,400 digits
    --train-iters "$num_iters"
    --lr 3e-3                    # high for Adam, and fine at this size with warm-up and clipping
    --lr-warmup-iters $((num_iters / 12))
    --lr-decay-style cosine
    --min-lr 0
    --adam-beta2 0.99            # few steps: the second moment must follow quickly
    --weight-decay 0.01
    --clip-grad 1.0
    --pulse-ema-decay 0.995      # averages over the last 200 steps, whose learning rate is low
    --eval-interval 200
    --eval-iters 4
)

num_ranks=4 # one per CPU process over gloo; on GPUs one per GPU over NCCL
where="CPU processes"
if num_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') && [ "$num_gpus" -gt 0 ]; then
    where="GPU(s)"
    num_ranks=$((num_gpus >= 4 ? 4 : num_gpus >= 2 ? 2 : 1))
fi

marker=$run_dir/.quickstart # how far the run came, and with which settings
log=$run_dir/train.log
settings=$(echo "${model[*]} ${training[*]}" | cksum)
if [ -e "$run_dir" ] && ! [ -d "$run_dir" ]; then
    echo "quickstart: $run_dir is a file; set PULSE_RUN_DIR to a folder." >&2
    exit 2
fi
if [ -n "$(ls -A "$run_dir" 2>/dev/null)" ] && ! [ -f "$marker" ]; then
    echo "quickstart: $run_dir holds other files; set PULSE_RUN_DIR to a new folder." >&2
    exit 2
fi
mkdir -p "$run_dir"
if [ "$(cat "$marker" 2>/dev/null)" = "begun $settings" ] &&
    [ -f "$run_dir/checkpoints/latest_checkpointed_iteration.txt" ]; then
    echo "Continuing the interrupted run in $run_dir from iteration" \
        "$(cat "$run_dir/checkpoints/latest_checkpointed_iteration.txt")."
else
    rm -rf "$run_dir"/{checkpoints,tensorboard,train.log,loss.png,loss.json,digits.png,report.json}
fi
echo "begun $settings" >"$marker"

progress() { # the newest iteration line of Megatron's log as one line
    sed -nE 's/.*iteration +([0-9]+)\/ +([0-9]+) .*loss: ([0-9.E+-]+) .*/\1 of \2, loss \3/p' \
        "$log" | tail -n 1
}

show_progress() { # until the process $1 ends: live on a terminal, now and then in a file
    local shown="" now
    while kill -0 "$1" 2>/dev/null; do
        sleep 1
        now=$(progress)
        if [ "$now" != "$shown" ]; then
            if [ -t 1 ]; then
                printf '\r  step %-48s' "$now"
            elif ((${now%% *} % 200 == 0)); then
                echo "  step $now"
            fi
            shown=$now
        fi
    done
    if [ -t 1 ] && [ -n "$shown" ]; then echo; fi
}

echo "Training on $num_ranks $where, folded P=$num_ranks (log: $log) ..."
export OMP_NUM_THREADS=1 WANDB_MODE=disabled PYTHONWARNINGS=ignore
start=$SECONDS
.venv/bin/torchrun --standalone --nproc-per-node "$num_ranks" launch/pretrain_diffusion.py \
    "${model[@]}" "${training[@]}" --pipeline-model-parallel-size "$num_ranks" \
    --pulse-no-progress --log-interval 25 \
    --save "$run_dir/checkpoints" --load "$run_dir/checkpoints" \
    --save-interval $((num_iters / 3 + 1)) \
    --tensorboard-dir "$run_dir/tensorboard" --tensorboard-log-interval 1 \
    >"$log" 2>&1 &
trainer=$!
stop() {
    kill "$trainer" 2>/dev/null || true
    wait "$trainer" 2>/dev/null || true
    echo "quickstart: interrupted; start it again to go on from the last checkpoint." >&2
    exit 130
}
trap stop INT TERM
show_progress "$trainer"
if ! wait "$trainer"; then
    echo "quickstart: training failed. What $log says:" >&2
    # Every rank says the same; the first to speak is enough.
    if said=$(grep -m 1 -A 8 -E '^error: |first failure in this job' "$log"); then
        awk 'NR > 1 && !/^  /{exit} {print "  | " $0}' <<<"$said" >&2
    else
        tail -n 20 "$log" | sed 's/^/  | /' >&2
    fi
    exit 1
fi
trap - INT TERM
echo "Trained in $((SECONDS - start)) s. Drawing the loss curve and sampling ..."
.venv/bin/pulse curve --tensorboard-dir "$run_dir/tensorboard" -o "$run_dir/loss.png" \
    --title "U-ViT on MNIST digits, folded over $num_ranks ranks"
# Guidance 3: of 1, 2 and 3 it gives the clearest digits after so short a training.
.venv/bin/pulse sample --load "$run_dir/checkpoints" -o "$run_dir/digits.png" \
    --classes 0-9 --per-class 10 --steps 25 --guidance 3 --score mnist --json "$run_dir/report.json"
echo "done $settings" >"$marker"
echo
echo "Loss curve: $run_dir/loss.png"
echo "Digits:     $run_dir/digits.png (one row per digit; the score is above)"
