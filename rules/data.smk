"""The TMDB: check out its builder, build it, check every record, report on it.

Inputs: the builder (embedded, a git repository, Hub or JSON sources), or a finished TMDB.
Outputs: data/<name>/, outputs/<run>/tmdb_validation/, outputs/<run>/data_report/.
"""

DATA = RUN.literal(RUN.paths.data)
DATA_IDENTITY = RUN.literal(RUN.paths.data_identity)
CLONE_RECORD = RUN.literal(RUN.paths.clone_record)
VALIDATION = f"{OUT}/tmdb_validation"


if RUN.config.builder.kind in ("embedded", "git"):

    rule clone_dataset_builder:
        output:
            CLONE_RECORD,
        log:
            f"{LOGS}/clone_dataset_builder.log",
        benchmark:
            f"{LOGS}/clone_dataset_builder.benchmark.tsv"
        localrule: True
        conda:
            "../envs/workflow.yaml"
        params:
            identity=RUN.clone_flags(),
            code=RUN.code("clone_dataset_builder"),
            program=lambda wildcards, output: RUN.program("clone_dataset_builder"),
            checkout=lambda wildcards, output: RUN.config.builder.checkout,
        message:
            "Checking out the dataset builder"
        shell:
            "{params.program:q} {params.identity:q} --checkout {params.checkout:q} --record {output:q}"
            " 2>&1 | tee -i {log:q}"


if RUN.config.builder.kind != "existing":

    # A checkpoint: after a rebuild the stages behind it are looked at again, and run only if the TMDB differs.
    checkpoint build_tmdb:
        input:
            builder=RUN.builder_inputs(),
        output:
            metadata=f"{DATA}/metadata.json",
            identity=DATA_IDENTITY,
        log:
            f"{LOGS}/build_tmdb.log",
        benchmark:
            f"{LOGS}/build_tmdb.benchmark.tsv"
        conda:
            "../envs/workflow.yaml"
        threads: RUN.stage("data").threads
        resources:
            mem_mb=RUN.stage("data").mem_mb,
            runtime=RUN.stage("data").runtime,
        params:
            identity=RUN.builder_flags(),
            code=RUN.code("build_tmdb", "identify_tmdb"),
            program=lambda wildcards, output: RUN.program("build_tmdb"),
            identify=lambda wildcards, output: RUN.program("identify_tmdb"),
            places=lambda wildcards, output: RUN.builder_places(),
            data=lambda wildcards, output: RUN.paths.data,
        message:
            "Building the TMDB"
        shell:
            "({params.program:q} {params.identity:q} {params.places:q} --output {params.data:q} &&"
            " {params.identify:q} --data {params.data:q} --output {output.identity:q})"
            " 2>&1 | tee -i {log:q}"

else:

    checkpoint build_tmdb:
        input:
            metadata=f"{DATA}/metadata.json",
            records=f"{DATA}/records.jsonl",
        output:
            identity=DATA_IDENTITY,
        log:
            f"{LOGS}/build_tmdb.log",
        benchmark:
            f"{LOGS}/build_tmdb.benchmark.tsv"
        localrule: True
        conda:
            "../envs/workflow.yaml"
        params:
            code=RUN.code("identify_tmdb"),
            program=lambda wildcards, input: RUN.program("identify_tmdb"),
            data=lambda wildcards, input: RUN.paths.data,
        message:
            "Looking at the TMDB in {params.data}"
        shell:
            "{params.program:q} --data {params.data:q} --output {output.identity:q}" " 2>&1 | tee -i {log:q}"


rule validate_tmdb:
    input:
        tmdb=tmdb,
        model=f"{OUT}/model.json",
    output:
        validation=f"{VALIDATION}/validation.json",
        accepted=f"{VALIDATION}/accepted.parquet",
        rejects=f"{VALIDATION}/rejects.jsonl",
    log:
        f"{LOGS}/validate_tmdb.log",
    benchmark:
        f"{LOGS}/validate_tmdb.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    threads: RUN.stage("data").threads
    resources:
        mem_mb=RUN.stage("data").mem_mb,
        runtime=RUN.stage("data").runtime,
    params:
        identity=RUN.validation_flags(),
        code=RUN.code("validate_tmdb"),
        program=lambda wildcards, output: RUN.program("validate_tmdb"),
        places=lambda wildcards, input, output, threads: RUN.validation_places(threads),
    message:
        "Checking every record of the TMDB"
    shell:
        "{params.program:q} {params.identity:q} {params.places:q} 2>&1 | tee -i {log:q}"


rule data_report:
    input:
        tmdb=tmdb,
        validation=rules.validate_tmdb.output.validation,
        accepted=rules.validate_tmdb.output.accepted,
        rejects=rules.validate_tmdb.output.rejects,
    output:
        json=f"{OUT}/data_report/data_report.json",
        html=report(
            f"{OUT}/data_report/data_report.html",
            caption="../report/data_report.rst",
            category="Data",
            labels={"what": "data report"},
        ),
    log:
        f"{LOGS}/data_report.log",
    benchmark:
        f"{LOGS}/data_report.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    threads: RUN.stage("data").threads
    resources:
        mem_mb=RUN.stage("data").mem_mb,
        runtime=RUN.stage("data").runtime,
    params:
        identity=RUN.split_flags(),
        code=RUN.code("data_report"),
        program=lambda wildcards, output: RUN.program("data_report"),
        places=lambda wildcards, input, output: RUN.report_places(),
    message:
        "Reporting on the data"
    shell:
        "{params.program:q} {params.identity:q} {params.places:q} 2>&1 | tee -i {log:q}"
