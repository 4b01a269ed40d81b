# A job that its scheduler ended when its time was up.
echo "{'loss': 1.234, 'step': 10}"
echo "slurmstepd: error: *** JOB 4711 ON node7 CANCELLED AT 2026-11-20T18:14:00 DUE TO TIME LIMIT ***"
echo "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
echo "Killed"
