"""``launch/gpu_check.sh``: checks of a GPU, each in a process of its own, and one report."""
