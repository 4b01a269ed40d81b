# What Kubernetes says of a pod that outgrew its limit.
echo "{'loss': 1.234, 'step': 10}"
echo "Name: grpo-trainer-0"
echo "    State:          Terminated"
echo "      Reason:       OOMKilled"
echo "      Exit Code:    137"
