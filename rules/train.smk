"""Training of one arm with one seed.

Inputs: the accepted records, the base model. Outputs: summary, step log and checkpoint.json, which lists the saved
model's files. The model itself and the resume points are not declared, so that no rerun deletes them unasked.
"""


rule train:
    input:
        tmdb=tmdb,
        validation=rules.validate_tmdb.output.validation,
        accepted=rules.validate_tmdb.output.accepted,
        model=rules.prepare_model.output.model,
    output:
        summary=report(
            f"{OUT}/{{arm}}/{{seed}}train_summary_{{arm}}.json",
            caption="../report/train_summary.rst",
            category="Training",
            labels={"arm": "{arm}", "seed": "{seed}", "what": "summary"},
        ),
        steps=f"{OUT}/{{arm}}/{{seed}}step_log.jsonl",
        checkpoint=f"{OUT}/{{arm}}/{{seed}}checkpoint.json",
    log:
        f"{LOGS}/train/{{seed}}{{arm}}.log",
    benchmark:
        f"{LOGS}/train/{{seed}}{{arm}}.benchmark.tsv"
    wildcard_constraints:
        arm="|".join(RUN.arms),
    conda:
        "../envs/workflow.yaml"
    threads: RUN.stage("train").threads
    resources:
        **RUN.device_resources(),
        mem_mb=RUN.stage("train").mem_mb,
        runtime=RUN.stage("train").runtime,
    params:
        identity=lambda wildcards: RUN.train_flags(wildcards.arm, wildcards.seed),
        world=RUN.world(),
        deepspeed=RUN.deepspeed_content(),
        saved=lambda wildcards: RUN.saved(wildcards.arm, wildcards.seed),
        code=RUN.code("train"),
        program=lambda wildcards, threads: RUN.launched("train", threads),
        places=lambda wildcards, input: RUN.train_places(wildcards.arm, wildcards.seed),
        record=lambda wildcards, output: RUN.record_command(wildcards.arm, wildcards.seed),
    message:
        "Training arm {wildcards.arm} {wildcards.seed}"
    # A cluster signals every process of a job: the shell and the log must outlive the program, which writes its resume
    # point. The launcher gives the program its SIGTERM back.
    shell:
        "trap '' TERM; ({params.program:q} {params.identity:q} {params.places:q} && {params.record:q}) 2>&1 | tee -i {log:q}"
