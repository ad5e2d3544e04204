"""Which clip helps: `python -m benchmarks.methods` trains six small tasks with every
method, four faults, five rates and five seeds, and writes where each run ended as JSON.

    python -m benchmarks.methods             all: less than an hour
    python -m benchmarks.methods --quick     few methods, one seed, short runs: to see
                                             that it works. Its numbers mean nothing
    python -m benchmarks.methods --json PATH in place of methods.json. What is in this
                                             file is not trained again. With a full
                                             file it prints tables and claims of papers
    python -m benchmarks.pages               writes docs/which_clip_helps.md from it
    python -m benchmarks.pictures            draws its picture

    tasks       what is trained
    clippers    what is compared
    training    the faults, and the loop
    private     a seventh task, with differential privacy
    scores      from where runs ended to tables
    claims      what papers say
"""
