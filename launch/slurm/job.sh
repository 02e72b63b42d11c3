# shellcheck shell=bash
# Sourced by launch/slurm/pretrain.sbatch: rendezvous of the ranks; stop, requeue and continuation.

# Each array element has its own job id, except the last, whose id is the whole array's.
pulse_job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    pulse_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi

# pulse_flag NAME FLAG...: prints the value of the last NAME (such as --save) in a command line.
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

# pulse_slurm COMMAND...: prints the output of a Slurm command. The controller may be busy, so a
# failing command is retried for PULSE_SLURM_SECONDS (120). Then the failure is reported, and the
# command's status returned.
pulse_slurm() {
    local answer status pause=1 end=$((SECONDS + ${PULSE_SLURM_SECONDS:-120}))
    until answer=$("$@"); do
        status=$?
        if ((SECONDS + pause > end)); then
            echo "slurm: '$*' failed (status $status), and is not called again." >&2
            return "$status"
        fi
        echo "slurm: '$*' failed (status $status); called again in $pause s." >&2
        sleep "$pause" || true # Slurm may end it with a signal
        pause=$((pause < 8 ? 2 * pause : 15))
    done
    [ -z "$answer" ] || echo "$answer"
}

# pulse_job_field NAME: prints a field of this job from scontrol, such as JobState; nothing if the
# job lacks the field. Returns status 1 if scontrol does not answer.
pulse_job_field() {
    local shown
    shown=$(pulse_slurm scontrol --oneliner show job "$pulse_job") || return 1
    grep -oP "(?<= $1=)\S+" <<<"$shown" | head -n 1 || true
}

# pulse_master_addr: prints the first node's name if it resolves, else its address from Slurm.
pulse_master_addr() {
    local nodes node shown
    nodes=$(pulse_slurm scontrol show hostnames "$SLURM_JOB_NODELIST") || return 1
    node=${nodes%%$'\n'*}
    if getent hosts "$node" >/dev/null; then
        echo "$node"
        return
    fi
    shown=$(pulse_slurm scontrol --oneliner show node "$node") || return 1
    if ! grep -oP '(?<= NodeAddr=)\S+' <<<"$shown"; then
        echo "error: Slurm knows no address of node $node: set PULSE_MASTER_ADDR." >&2
        return 1
    fi
}

# pulse_saved: prints the iteration of the newest checkpoint in pulse_save, or nothing.
pulse_saved() {
    cat "$pulse_save/latest_checkpointed_iteration.txt" 2>/dev/null || true
}

# pulse_run SAVE COMMAND...: runs COMMAND on every node of the job, until it ends or must stop:
#   - USR1, which Slurm sends to this shell before the time limit (--signal=B:USR1@180): the ranks
#     write a checkpoint into SAVE and exit, and the job is requeued;
#   - preemption with a grace time: Slurm signals the ranks; the job is requeued;
#   - scontrol requeue, preemption without grace, scancel: Slurm signals the ranks, waits KillWait
#     seconds, and does the rest.
# Returns COMMAND's status if the job is not requeued.
pulse_run() {
    local status=1 before limit= waits
    pulse_save=$1
    shift
    before=$(pulse_saved)
    pulse_asked= pulse_told=
    trap 'pulse_asked=1' USR1
    trap ':' TERM # Slurm tells this shell too; it waits for its ranks
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --kill-on-bad-exit=1 "$@" &
    pulse_step=$!
    while kill -0 "$pulse_step" 2>/dev/null; do
        if [ -n "$pulse_asked" ]; then
            [ -n "$pulse_told" ] || pulse_ask
            # If squeue does not answer now, the next pass asks again.
            limit=${limit:-$(pulse_last_moment || true)}
            waits=${limit:-${SLURM_JOB_END_TIME:+$((SLURM_JOB_END_TIME - 30))}}
            if [ -n "$waits" ] && (($(date +%s) >= waits)); then
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

# pulse_ask: sends SIGTERM to all ranks, which save and exit. If scancel fails, srun forwards the
# signal and the next pass calls scancel again; ranks ignore a second signal.
pulse_ask() {
    echo "slurm: the time limit is near; asking the ranks to save and stop ..."
    if scancel --signal=TERM "$pulse_job"; then # the steps' processes, not this shell
        pulse_told=1
    else
        echo "slurm: scancel failed (status $?); asking through srun." >&2
        kill -TERM "$pulse_step" || true # it may have ended
    fi
}

# pulse_last_moment: prints the time 30 s before the job's end, in seconds since 1970. Returns
# status 1 if squeue fails or does not know this job.
pulse_last_moment() {
    local said end
    if ! said=$(squeue --noheader --jobs "$pulse_job" --format %e) || [ -z "${said//[[:space:]]/}" ]
    then
        echo "slurm: squeue does not say when job $pulse_job ends; asked again." >&2
        return 1
    fi
    if end=$(date -d "$said" +%s 2>/dev/null); then
        echo $((end - 30))
    else
        echo $(($(date +%s) + 31536000)) # no time limit
    fi
}

# pulse_requeue BEFORE: requeues this job if Slurm stopped it and does not requeue by itself.
pulse_requeue() {
    local saved state preempted PULSE_SLURM_SECONDS=${PULSE_SLURM_SECONDS:-120}
    if [ -n "$pulse_asked" ] && ((PULSE_SLURM_SECONDS > 10)); then
        PULSE_SLURM_SECONDS=10 # some 30 s are left
    fi
    if ! state=$(pulse_job_field JobState) || [ -z "$state" ]; then
        if [ -z "$pulse_asked" ]; then
            echo "slurm: Slurm does not say whether job $pulse_job was preempted: not requeued." \
                "If it was, submit it again with the same --save." >&2
            return
        fi
        echo "slurm: Slurm does not say how job $pulse_job is; its time limit is near." >&2
    elif [ "$state" != RUNNING ]; then
        return # cancelled, or being requeued
    fi
    if [ -z "$pulse_asked" ]; then
        if ! preempted=$(pulse_job_field PreemptTime); then
            echo "slurm: Slurm does not say whether job $pulse_job was preempted: not requeued." \
                "If it was, submit it again with the same --save." >&2
            return
        fi
        if [ -z "$preempted" ] || [ "$preempted" = None ]; then
            return # the ranks failed
        fi
    fi
    saved=$(pulse_saved)
    if [ -n "$pulse_asked" ] && [ "$saved" = "$1" ]; then
        echo "slurm: nothing was saved in all the time of this job: not requeued, since the next" \
            "start would get no further. Raise --time, or --signal=B:USR1@SECONDS." >&2
        return
    fi
    # Printed first: Slurm may end this shell before the command returns.
    echo "slurm: requeued; continues from iteration ${saved:-0}."
    if ! pulse_slurm scontrol requeue "$pulse_job"; then
        echo "slurm: not requeued after all: scontrol requeue $pulse_job, or submit it again with" \
            "the same --save." >&2
    fi
}
