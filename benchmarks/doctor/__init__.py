"""What the doctor says of 40 trainings broken on purpose, and of 40 healthy ones.

loops      how a training is run, and its log
models     a perceptron and a decoder, and their batches
faults     what breaks a training
broken     the table of broken trainings
healthy    healthy trainings, and their table
table      what a row of both is, and the halves
"""
