"""What the doctor says of 40 trainings broken on purpose, and of 40 healthy ones.

loops      how a training is run, and its log
models     a perceptron and a decoder, and their batches
broken     what breaks a training, and the table of broken ones
healthy    healthy trainings, and their table
table      the shape of both tables, and their halves
"""
