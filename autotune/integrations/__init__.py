"""What runs in the user's own training process. A framework is imported by the file that is named after it, and no other.

trl.py         the callback: it watches memory while the real run trains, and tells what to do when it ran out
gauges.py      how much this rank holds, of which limit
margin.py      whether what is left will last, by how the peak grew so far
running.py     the running trainer's own configuration, as a candidate
aftermath.py   out of memory: the diagnosis and the next smaller configuration, as files
"""
