"""Where the jobs of a sweep run: on this machine, on a cluster. One file an option of conf/launcher/."""
