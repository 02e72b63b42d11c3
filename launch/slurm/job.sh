# shellcheck shell=bash
# Sourced by launch/slurm/pretrain.sbatch: where ranks meet, and how a run is stopped and goes on.

# An element of an array has a number of its own, but the last one's is the whole array's.
pulse_job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    pulse_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi

# pulse_flag NAME FLAG...: the value of the last NAME (such as --save) in a command line.
pulse_flag() {
    local name=$1 value=
    shift
    while (($#)); do
        case $1 in
            "$name") value=${2:-} ;;
            "$name"=*) value=${1#*=} ;;
        esac
        shift
    done
    echo "$value"
}

# pulse_job_field NAME: what scontrol knows of this job, such as JobState.
pulse_job_field() {
    scontrol --oneliner show job "$pulse_job" | grep -oP "(?<= $1=)\S+" | head -n 1
}

# pulse_master_addr: the first node, by its name where that resolves, else where Slurm reaches it.
pulse_master_addr() {
    local node
    node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    if getent hosts "$node" >/dev/null; then
        echo "$node"
    else
        scontrol --oneliner show node "$node" | grep -oP '(?<= NodeAddr=)\S+'
    fi
}

# pulse_saved: iteration of the newest checkpoint in pulse_save; nothing where there is none.
pulse_saved() {
    cat "$pulse_save/latest_checkpointed_iteration.txt" 2>/dev/null || true
}

# pulse_run SAVE COMMAND...: COMMAND on every node of the job, until it ends or is asked to stop:
#   - USR1, which Slurm sends to this shell before the time limit (--signal=B:USR1@180): the ranks
#     are asked to stop, write a checkpoint into SAVE, and the job is requeued;
#   - preemption with a grace time: Slurm itself asks the ranks; the job is requeued;
#   - scontrol requeue, preemption without grace, scancel: Slurm asks the ranks, gives them
#     KillWait seconds, and does the rest.
# Returns COMMAND's status where the job is not requeued.
pulse_run() {
    local status=1 before limit=
    pulse_save=$1
    shift
    before=$(pulse_saved)
    pulse_asked=
    trap 'pulse_ask' USR1
    trap ':' TERM # Slurm tells this shell too; it waits for its ranks
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --kill-on-bad-exit=1 "$@" &
    pulse_step=$!
    while kill -0 "$pulse_step" 2>/dev/null; do
        if [ -n "$pulse_asked" ]; then
            limit=${limit:-$(pulse_last_moment)}
            if (($(date +%s) >= limit)); then
                echo "slurm: the ranks did not stop in time. Let Slurm ask earlier:" \
                    "sbatch --signal=B:USR1@SECONDS." >&2
                break
            fi
        fi
        sleep 1 || true # traps run after it; Slurm may end it with a signal
    done
    if ! kill -0 "$pulse_step" 2>/dev/null; then
        wait "$pulse_step" && status=0 || status=$?
    fi
    ((status == 0)) || pulse_requeue "$before"
    return "$status"
}

# pulse_ask: SIGTERM to all ranks, which save and leave.
pulse_ask() {
    pulse_asked=1
    echo "slurm: the time limit is near; asking the ranks to save and stop ..."
    scancel --signal=TERM "$pulse_job" # the steps' processes, not this shell
}

# pulse_last_moment: 30 s before the job's end, in seconds since 1970.
pulse_last_moment() {
    local end
    if end=$(date -d "$(squeue --noheader --jobs "$pulse_job" --format %e)" +%s 2>/dev/null); then
        echo $((end - 30))
    else
        echo $(($(date +%s) + 31536000)) # no time limit
    fi
}

# pulse_requeue BEFORE: requeue this job if Slurm asked it to stop and does not do so itself.
pulse_requeue() {
    local saved
    if [ "$(pulse_job_field JobState)" != RUNNING ]; then
        return # cancelled, or being requeued
    fi
    if [ -z "$pulse_asked" ] && [ "$(pulse_job_field PreemptTime)" = None ]; then
        return # the ranks failed
    fi
    saved=$(pulse_saved)
    if [ -n "$pulse_asked" ] && [ "$saved" = "$1" ]; then
        echo "slurm: nothing was saved in all the time of this job: not requeued, since the next" \
            "start would get no further. Raise --time, or --signal=B:USR1@SECONDS." >&2
        return
    fi
    echo "slurm: requeued; goes on from iteration ${saved:-0}."
    scontrol requeue "$pulse_job"
}
