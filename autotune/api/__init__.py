"""Python API: `run`, `predict`, `diagnose`, `job`, with the flags of the command as keywords.

    answer = autotune.run(model="Qwen2.5-0.5B", budget="20m", listener=print)
    if answer.winner is not None:
        print(answer.files, answer.document["recommendation"]["tokens_per_second"])

Nothing is printed: a listener receives the events of `autotune.core.events`. Errors:
`autotune.core.errors`.

answers.py       RunAnswer and PredictAnswer
run_requests.py  run, job: measured search, or forecast without GPUs
predictions.py   predict: one configuration; its emulation
diagnoses.py     diagnose: a log
job_start.py     event and notes with which a job starts
"""
