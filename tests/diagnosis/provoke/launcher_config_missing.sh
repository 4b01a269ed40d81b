# accelerate with a configuration file that is not there.
python -m accelerate.commands.launch --config_file zero3.yaml train.py
