"""The comparison of all arms.

Inputs: summaries, step logs and evaluations of every arm and seed. Outputs: results/<run>/comparison.*
"""

COMPARISON_FILES = ["comparison.json", "comparison.csv", "comparison.md"]


rule compare:
    input:
        tmdb=tmdb,
        summaries=RUN.summaries(),
        evaluations=RUN.all_evaluations(),
        data=rules.data_report.output.json,
        validation=rules.validate_tmdb.output.validation,
    output:
        [f"{RESULTS}/{name}" for name in COMPARISON_FILES],
        html=report(
            f"{RESULTS}/comparison.html",
            caption="../report/comparison.rst",
            category="Comparison",
            labels={"what": "comparison"},
        ),
    log:
        f"{LOGS}/compare.log",
    benchmark:
        f"{LOGS}/compare.benchmark.tsv"
    conda:
        "../envs/workflow.yaml"
    threads: RUN.stage("compare").threads
    resources:
        mem_mb=RUN.stage("compare").mem_mb,
        runtime=RUN.stage("compare").runtime,
    params:
        identity=RUN.compare_flags(),
        code=RUN.code("compare"),
        program=lambda wildcards, output: RUN.program("compare"),
        places=lambda wildcards, output: RUN.compare_places(),
    message:
        "Comparing the arms"
    # Status 3: written, but a number is missing or not finite; the page and the end of the run say so.
    shell:
        "({params.program:q} {params.identity:q} {params.places:q} || [ $? -eq 3 ])" " 2>&1 | tee -i {log:q}"
