# shellcheck shell=bash
# Environment of every Slurm job here. The .sbatch scripts source this file in the batch shell, and
# srun passes the environment to all nodes. Put a site's settings here, or export them before
# sbatch, which passes on its own environment: VARIABLE=value sbatch ...
#
#   PULSE_ROOT            this repository; default: the folder in which sbatch was called
#   PULSE_VENV            its virtual environment, on storage that all nodes see
#   PULSE_RANKS_PER_NODE  ranks on each node; default: one per allocated GPU, or one
#   PULSE_MASTER_ADDR     rendezvous host of the ranks; default: the first node of the job
#   PULSE_MASTER_PORT     rendezvous port; default: derived from the job's number
#   PULSE_SLURM_SECONDS   time for retries of a failing Slurm command; default: 120

export PULSE_VENV=${PULSE_VENV:-$PULSE_ROOT/.venv}
if ! [ -x "$PULSE_VENV/bin/pulse" ]; then
    echo "error: no pulse in $PULSE_VENV/bin. Once, where there is a network, run in" \
        "$PULSE_ROOT:  bash -c 'source launch/setup.sh && pulse_setup'" >&2
    exit 2
fi
export PATH=$PULSE_VENV/bin:$PATH

# Without cached bytecode every rank would compile thousands of modules at its start.
unset PYTHONDONTWRITEBYTECODE
# Unbuffered, so that losses appear in the job's output at once.
export PYTHONUNBUFFERED=1
# Ranks share the cores of a node; more threads than cores slow all ranks down. On CPUs the number
# of threads also changes sums: keep the number in a run that must repeat bit for bit.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Compiled kernels go to the node's own disk: ranks of several nodes would race for a shared home.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/pulse-$UID/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/pulse-$UID/inductor}
# Since Slurm 22.05 srun takes a job's CPUs per task only from this variable.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

# Optional settings for NCCL and gloo:
# export NCCL_SOCKET_IFNAME=ib0    # the network on which all nodes reach each other
# export GLOO_SOCKET_IFNAME=ib0    # the same for runs on CPUs
# export NCCL_IB_HCA=mlx5          # only these adapters, if others are for storage
# export NCCL_CROSS_NIC=1          # rails joined by one fabric
# export NCCL_DEBUG=INFO           # log the chosen network, to debug hangs or slow runs
