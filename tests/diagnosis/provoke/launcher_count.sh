# torchrun with a number that is none.
python -m torch.distributed.run --nproc-per-node two train.py
