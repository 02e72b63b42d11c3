# Sourced by launch/quickstart.sh and launch/emoji.sh: an interruptible training run.

# pulse_choose_ranks MOST: sets num_ranks to PULSE_RANKS or the largest power of two up to MOST, and
# where to the device. CPU processes use gloo, GPUs NCCL, one rank each.
pulse_choose_ranks() {
    local num_gpus
    num_ranks=${PULSE_RANKS:-$1}
    if ! [[ $num_ranks =~ ^[1-9][0-9]?$ ]] || ((num_ranks > $1 || num_ranks & num_ranks - 1)); then
        echo "PULSE_RANKS must be a power of two up to $1, not $num_ranks." >&2
        return 2
    fi
    where="CPU processes"
    if num_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') && [ "$num_gpus" -gt 0 ]; then
        where="GPU(s)"
        while ((num_ranks > num_gpus)); do num_ranks=$((num_ranks / 2)); done
    fi
}

# pulse_begin NAME RUN_DIR SETTINGS FILE...: prepares RUN_DIR for a run with these settings. An
# interrupted run with the same settings continues. Any other run starts over without the FILEs.
# Deletes only files that NAME wrote.
pulse_begin() {
    local name=$1 run_dir=$2 settings=$3 latest=$2/checkpoints/latest_checkpointed_iteration.txt
    local marker=$run_dir/.$name
    if [ -e "$run_dir" ] && ! [ -d "$run_dir" ]; then
        echo "$name: $run_dir is a file; set PULSE_RUN_DIR to a folder." >&2
        return 2
    fi
    if [ -n "$(ls -A "$run_dir" 2>/dev/null)" ] && ! [ -f "$marker" ]; then
        echo "$name: $run_dir holds other files; set PULSE_RUN_DIR to a new folder." >&2
        return 2
    fi
    mkdir -p "$run_dir"
    exec {pulse_lock}>>"$marker" # held until this script and all that it started have ended
    if ! flock --nonblock "$pulse_lock"; then
        echo "$name: another one is running in $run_dir; set PULSE_RUN_DIR to a new folder." >&2
        return 2
    fi
    if [ "$(cat "$marker" 2>/dev/null)" = "begun $settings" ] && [ -f "$latest" ]; then
        echo "Continuing the interrupted run in $run_dir from iteration $(cat "$latest")."
    else
        (cd "$run_dir" && rm -rf checkpoints tensorboard train.log "${@:4}")
    fi
    echo "begun $settings" >"$marker"
}

# pulse_end NAME RUN_DIR: marks the run as finished, so that the next start begins a new run.
pulse_end() {
    sed -i 's/^begun/done/' "$2/.$1"
}

# pulse_train NAME RUN_DIR NUM_ITERS FLAG...: trains on num_ranks, shows progress and reports
# errors.
pulse_train() {
    local name=$1 run_dir=$2 num_iters=$3 log=$2/train.log start=$SECONDS said
    echo "Training on $num_ranks $where, folded P=$num_ranks (log: $log) ..."
    OMP_NUM_THREADS=1 WANDB_MODE=disabled PYTHONWARNINGS=ignore \
        .venv/bin/pulse run --nproc-per-node "$num_ranks" \
        launch/pretrain_diffusion.py "${@:4}" --pipeline-model-parallel-size "$num_ranks" \
        --train-iters "$num_iters" --pulse-no-progress --log-interval 25 \
        --save "$run_dir/checkpoints" \
        --save-interval $((num_iters / 3 + 1)) \
        --tensorboard-dir "$run_dir/tensorboard" --tensorboard-log-interval 1 \
        >"$log" 2>&1 &
    pulse_trainer=$!
    trap 'pulse_stop "'"$name"'"' INT TERM
    pulse_show_progress "$pulse_trainer" "$log"
    if ! wait "$pulse_trainer"; then
        echo "$name: training failed. What $log says:" >&2
        # All ranks report the same error; show the first.
        if said=$(grep -m 1 -A 8 -E '^error: |first failure in this job' "$log"); then
            awk 'NR > 1 && !/^  /{exit} {print "  | " $0}' <<<"$said" >&2
        else
            tail -n 20 "$log" | sed 's/^/  | /' >&2
        fi
        return 1
    fi
    trap - INT TERM
    echo "Trained in $((SECONDS - start)) s."
}

pulse_stop() {
    kill "$pulse_trainer" 2>/dev/null || true
    wait "$pulse_trainer" 2>/dev/null || true
    echo "$1: interrupted; start it again to go on from the last checkpoint." >&2
    exit 130
}

# pulse_show_progress PID LOG: shows progress until PID ends: live on a terminal, else at intervals.
pulse_show_progress() {
    local shown="" now
    while kill -0 "$1" 2>/dev/null; do
        sleep 1
        # Condense the newest iteration line of Megatron's log to one line.
        now=$(sed -nE 's/.*iteration +([0-9]+)\/ +([0-9]+) .*[|] loss ([0-9.e+-]+) .*/\1 of \2, loss \3/p' \
            "$2" | tail -n 1)
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
