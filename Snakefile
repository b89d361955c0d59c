"""What does Online Dynamic Batching do to my training: how much faster, and at what quality?

Data -> training per arm -> validation loss and MMMU-MC per checkpoint -> comparison. `./run.sh help` lists the
commands; config.yaml and config/README.md hold the settings; rules/ the steps.
"""

from snakemake.utils import min_version

min_version("9.0")


report: "report/workflow.rst"


include: "rules/common.smk"


rule all:
    input:
        RUN.comparison_files(),
        RUN.all_evaluations(),
    localrule: True


include: "rules/data.smk"
include: "rules/model.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/compare.smk"
include: "rules/tools.smk"
include: "rules/targets.smk"


onstart:
    RUN.start(workflow)


onsuccess:
    RUN.succeeded()


onerror:
    RUN.failed(log)
