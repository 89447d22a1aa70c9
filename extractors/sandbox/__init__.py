"""Run a worker on a hostile file behind walls that others built: bubblewrap, or Docker when asked.

    from sam3d_gguf.extractors.sandbox.job import SandboxChoice, WorkerJob
    from sam3d_gguf.extractors.sandbox.run import run_worker

    job = WorkerJob(source_fd=fd, source_path=path, output=folder)
    result = run_worker(job, SandboxChoice())
    result.raise_for_end()

The worker is a module of the mounted packages that defines

    def main(source_fd: int, output: str, arguments: list[str]) -> int

It is imported first; then the system call filter closes (no new process, no socket, no new
executable memory: everything it needs must be imported at the top), and only then `main` is called
with a read-only descriptor of the source and the path of the folder with the files, made before by
the caller, that it can write.
Its return value is the exit status.

Nothing is imported here: this package is also what the worker's own process starts from.
"""
