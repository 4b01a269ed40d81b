# The kernel's own words beside a training that it ended.
echo "{'loss': 1.234, 'step': 10}"
echo "[88123.1] python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"
echo "[88123.2] Memory cgroup out of memory: Killed process 4711 (python) total-vm:88221004kB, anon-rss:66810332kB, file-rss:1024kB"
