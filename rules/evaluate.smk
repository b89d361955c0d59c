"""Validation loss and MMMU-MC of a checkpoint.

Inputs: checkpoint.json of an arm (or of the untrained model), or a checkpoint of another training
(ODB_ACCEL_EVAL_CHECKPOINT). Batch sizes, processes and devices change nothing about a result and rerun nothing.
"""

VALLOSS_FILES = ["eval_results.json", "all_results.json", "per_sample_losses.jsonl"]
MMMU_FILES = ["mmmu_mc_likelihood_results.json", "predictions.jsonl", "excluded.jsonl", "score_audit.json"]


rule valloss:
    input:
        checkpoint=f"{OUT}/{{arm}}/{{seed}}checkpoint.json",
        tmdb=tmdb,
        validation=rules.validate_tmdb.output.validation,
        accepted=rules.validate_tmdb.output.accepted,
        model=rules.prepare_model.output.model,
    output:
        report(
            f"{OUT}/{{arm}}/{{seed}}eval_out_accelerate_valloss/{VALLOSS_FILES[0]}",
            caption="../report/valloss.rst",
            category="Evaluation",
            labels={"arm": "{arm}", "seed": "{seed}", "what": "validation loss"},
        ),
        [f"{OUT}/{{arm}}/{{seed}}eval_out_accelerate_valloss/{name}" for name in VALLOSS_FILES[1:]],
    log:
        f"{LOGS}/valloss/{{seed}}{{arm}}.log",
    benchmark:
        f"{LOGS}/valloss/{{seed}}{{arm}}.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    threads: RUN.stage("evaluate").threads
    resources:
        gpu=RUN.gpus("evaluate"),
        mem_mb=RUN.stage("evaluate").mem_mb,
        runtime=RUN.stage("evaluate").runtime,
    params:
        identity=RUN.valloss_flags(),
        code=RUN.code("valloss"),
        program=lambda wildcards, threads: RUN.launched("valloss", threads),
        places=lambda wildcards, input, output: RUN.valloss_places(input.checkpoint, output),
    message:
        "Validation loss of {input.checkpoint}"
    shell:
        "trap '' TERM; {params.program:q} {params.identity:q} {params.places:q} 2>&1 | tee -i {log:q}"


rule mmmu:
    input:
        checkpoint=f"{OUT}/{{arm}}/{{seed}}checkpoint.json",
        tmdb=tmdb_of_checkpoint,
        benchmark=RUN.benchmark_inputs(),
        model=rules.prepare_model.output.model,
    output:
        report(
            f"{OUT}/{{arm}}/{{seed}}mmmu_mc_likelihood_accelerate/{MMMU_FILES[0]}",
            caption="../report/mmmu.rst",
            category="Evaluation",
            labels={"arm": "{arm}", "seed": "{seed}", "what": "MMMU-MC"},
        ),
        [f"{OUT}/{{arm}}/{{seed}}mmmu_mc_likelihood_accelerate/{name}" for name in MMMU_FILES[1:]],
    log:
        f"{LOGS}/mmmu/{{seed}}{{arm}}.log",
    benchmark:
        f"{LOGS}/mmmu/{{seed}}{{arm}}.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    threads: RUN.stage("evaluate").threads
    resources:
        gpu=RUN.gpus("evaluate"),
        mem_mb=RUN.stage("evaluate").mem_mb,
        runtime=RUN.stage("evaluate").runtime,
    params:
        identity=RUN.mmmu_flags(),
        code=RUN.code("mmmu"),
        program=lambda wildcards, threads: RUN.launched("mmmu", threads),
        places=lambda wildcards, input, output: RUN.mmmu_places(input.checkpoint, output),
    message:
        "MMMU-MC of {input.checkpoint}"
    shell:
        "trap '' TERM; {params.program:q} {params.identity:q} {params.places:q} 2>&1 | tee -i {log:q}"


if RUN.external:
    EXTERNAL = RUN.literal(RUN.external.folder)

    use rule valloss as valloss_external with:
        input:
            checkpoint=RUN.external.inputs,
            tmdb=tmdb,
            validation=rules.validate_tmdb.output.validation,
            accepted=rules.validate_tmdb.output.accepted,
            model=rules.prepare_model.output.model,
        output:
            [f"{EXTERNAL}/eval_out_accelerate_valloss/{name}" for name in VALLOSS_FILES],
        log:
            f"{LOGS}/valloss/external/{RUN.external_name}.log",
        benchmark:
            f"{LOGS}/valloss/external/{RUN.external_name}.benchmark.tsv"
        params:
            identity=RUN.valloss_flags(),
            checkpoint=RUN.external.checkpoint,
            code=RUN.code("valloss"),
            program=lambda wildcards, threads: RUN.launched("valloss", threads),
            places=lambda wildcards, input, output: RUN.valloss_places(RUN.external.checkpoint, output),
        message:
            "Validation loss of {params.checkpoint}"

    use rule mmmu as mmmu_external with:
        input:
            checkpoint=RUN.external.inputs,
            benchmark=RUN.benchmark_inputs(),
            model=rules.prepare_model.output.model,
        output:
            [f"{EXTERNAL}/mmmu_mc_likelihood_accelerate/{name}" for name in MMMU_FILES],
        log:
            f"{LOGS}/mmmu/external/{RUN.external_name}.log",
        benchmark:
            f"{LOGS}/mmmu/external/{RUN.external_name}.benchmark.tsv"
        params:
            identity=RUN.mmmu_flags(),
            checkpoint=RUN.external.checkpoint,
            code=RUN.code("mmmu"),
            program=lambda wildcards, threads: RUN.launched("mmmu", threads),
            places=lambda wildcards, input, output: RUN.mmmu_places(RUN.external.checkpoint, output),
        message:
            "MMMU-MC of {params.checkpoint}"
