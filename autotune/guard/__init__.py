"""Guard of a training: starts it, watches it, and starts it again where it ended for lack of memory
or by a fault of the machine.

attempt.py         one start of the command: its processes, streams and signals
streams.py         its output, copied to ours; a terminal stays a terminal
watched.py         memory of its GPUs and processes, seen from outside
step_progress.py   steps, from the output and the checkpoints
checkpoints.py     the last whole checkpoint, by the framework's own layout
ending.py          why a training ended, and whether to start it again
smaller.py         the next configuration, which learns the same
training.py        that configuration as a file, and the command that reads it
own_training.py    the same for a command of the user's own, by placeholders
command_reading.py  what is guarded, from the words of the command
command_settings.py  settings in these words
before_the_limit.py  trend of the peak, hangs
save_request.py    request to the trainer to save before memory runs out
learned.py         what the record learns: steps, peak, lengths, speed, and how memory ran out
history.py         guard.json, and what is printed
watch.py           one attempt as it runs: steps, checkpoints, memory, hangs
guarding.py        the loop over all of these
"""
