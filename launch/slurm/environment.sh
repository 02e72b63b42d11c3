# shellcheck shell=bash
# The environment of every job here, in one place; sourced by the .sbatch scripts in the batch
# shell, from where srun hands it to all nodes. What a site needs belongs here, or is exported
# before sbatch (sbatch hands on its own environment): VARIABLE=value sbatch ...
#
#   PULSE_ROOT            this repository; without it, the folder that sbatch was called in
#   PULSE_VENV            its virtual environment; on storage that all nodes see
#   PULSE_RANKS_PER_NODE  ranks on each node; without it, one per allocated GPU, or one
#   PULSE_MASTER_ADDR     where the ranks meet; without it, the first node of the job
#   PULSE_MASTER_PORT     without it, a port from the job's number
#   PULSE_SLURM_SECONDS   for how long a Slurm command that fails is called again; without it, 120

export PULSE_VENV=${PULSE_VENV:-$PULSE_ROOT/.venv}
if ! [ -x "$PULSE_VENV/bin/pulse" ]; then
    echo "error: no pulse in $PULSE_VENV/bin. Once, where there is a network, run in" \
        "$PULSE_ROOT:  bash -c 'source launch/setup.sh && pulse_setup'" >&2
    exit 2
fi
export PATH=$PULSE_VENV/bin:$PATH

# Without cached bytecode every rank compiles thousands of modules at its start.
unset PYTHONDONTWRITEBYTECODE
# Losses show in the job's output as they come, not in blocks of 8 kB.
export PYTHONUNBUFFERED=1
# Ranks share the cores of a node; more threads than cores slow all of them down. On CPUs sums
# depend on it too: a run that is to repeat bit for bit keeps it.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Compiled kernels on the node's own disk: ranks of several nodes would race for a shared home.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/pulse-$UID/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/pulse-$UID/inductor}
# srun takes a job's CPUs per task only from here since Slurm 22.05.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

# NCCL and gloo, where a site needs them:
# export NCCL_SOCKET_IFNAME=ib0    # several networks: the one that all nodes reach each other on
# export GLOO_SOCKET_IFNAME=ib0    # the same for runs on CPUs
# export NCCL_IB_HCA=mlx5          # only these adapters, where others are for storage
# export NCCL_CROSS_NIC=1          # rails that are joined by one fabric
# export NCCL_DEBUG=INFO           # which network NCCL chose, when it hangs or is slow
