"""The base model and the benchmark data.

Outputs: outputs/<run>/model.json (and base_model/ for the embedded model), outputs/<run>/untrained/checkpoint.json,
data/embedded-mmmu/ for the embedded benchmark.
"""


rule prepare_model:
    input:
        RUN.model_inputs(tmdb),
    output:
        model=f"{OUT}/model.json",
        untrained=f"{OUT}/untrained/checkpoint.json",
    log:
        f"{LOGS}/prepare_model.log",
    benchmark:
        f"{LOGS}/prepare_model.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    threads: RUN.stage("data").threads
    resources:
        mem_mb=RUN.stage("data").mem_mb,
        runtime=RUN.stage("data").runtime,
    params:
        identity=RUN.model_flags(),
        code=RUN.code("prepare_model"),
        program=lambda wildcards, output: RUN.program("prepare_model"),
        places=lambda wildcards, output: RUN.model_places(),
    message:
        "Preparing the base model"
    shell:
        "{params.program:q} {params.identity:q} {params.places:q} 2>&1 | tee -i {log:q}"


if RUN.config.evaluation.mmmu.dataset == "embedded":

    rule prepare_benchmark:
        output:
            f"{RUN.benchmark_folder}/benchmark.json",
        log:
            f"{LOGS}/prepare_benchmark.log",
        benchmark:
            f"{LOGS}/prepare_benchmark.benchmark.tsv"
        localrule: True
        conda:
            "../envs/workflow.yaml"
        params:
            identity=RUN.benchmark_flags(),
            code=RUN.code("prepare_benchmark"),
            program=lambda wildcards, output: RUN.program("prepare_benchmark"),
            folder=lambda wildcards, output: RUN.paths.benchmark,
        message:
            "Making the embedded benchmark"
        shell:
            "{params.program:q} {params.identity:q} --output {params.folder:q}" " 2>&1 | tee -i {log:q}"
