"""Process mode: the host's root filesystem as a plan, and the init that runs the steps of every job container."""
