"""Targets without results of their own: look at samples, fetch what compute nodes cannot, report what is there."""


rule inspect:
    input:
        tmdb=tmdb,
        validation=rules.validate_tmdb.output,
        model=rules.prepare_model.output.model,
    log:
        f"{LOGS}/inspect.log",
    localrule: True
    conda:
        "../envs/workflow.yaml"
    params:
        program=lambda wildcards, threads: RUN.program("inspect"),
        places=lambda wildcards, threads: RUN.inspect_places(),
    message:
        "Drawing samples of each source as the model sees them"
    shell:
        "{params.program:q} {params.places:q} 2>&1 | tee -i {log:q}"


rule prefetch:
    input:
        RUN.builder_inputs(),
    log:
        f"{LOGS}/prefetch.log",
    localrule: True
    conda:
        "../envs/workflow.yaml"
    params:
        program=lambda wildcards, threads: RUN.program("prefetch"),
        places=lambda wildcards, threads: RUN.prefetch_places(),
    message:
        "Fetching model and benchmark"
    shell:
        "{params.program:q} {params.places:q} 2>&1 | tee -i {log:q}"


# From finished results only: no inputs, so that it can never start a training.
rule report:
    log:
        f"{LOGS}/report.log",
    localrule: True
    conda:
        "../envs/workflow.yaml"
    params:
        identity=RUN.compare_flags(),
        program=lambda wildcards, threads: RUN.program("compare"),
        places=lambda wildcards, threads: RUN.compare_places(),
    message:
        "Report from the results that are there"
    shell:
        "{params.program:q} {params.identity:q} {params.places:q} --allow-missing 2>&1 | tee -i {log:q}"
