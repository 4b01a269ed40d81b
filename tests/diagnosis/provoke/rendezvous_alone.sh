# Two nodes, of which the second never comes.
echo "import torch" > train.py
python -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29777 --rdzv-conf join_timeout=8 train.py
