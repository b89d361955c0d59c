"""Named targets: what a person asks for. Each arm has train_ARM, eval_ARM and all_ARM."""


rule comparison:
    input:
        RUN.comparison_files(),
    localrule: True


rule data:
    input:
        DATA_IDENTITY,
        rules.validate_tmdb.output,
        rules.data_report.output,
    localrule: True


rule eval_valloss:
    input:
        RUN.checkpoint_evaluation("valloss"),
    localrule: True


rule benchmark:
    input:
        RUN.checkpoint_evaluation("mmmu"),
    localrule: True


for _arm in RUN.arms:

    rule:
        name:
            f"train_{_arm}"
        input:
            RUN.trained(_arm),
        localrule: True

    rule:
        name:
            f"eval_{_arm}"
        input:
            RUN.evaluations(_arm),
        localrule: True

    rule:
        name:
            f"all_{_arm}"
        input:
            rules.data_report.output,
            RUN.trained(_arm),
            RUN.evaluations(_arm),
        localrule: True
