//! Makes the client of `forgeyard.executor.v1` from the project's own proto files.

use std::path::Path;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../api/forgeyard_api/proto");
    let executor = root.join("forgeyard/executor/v1/executor.proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let files = protox::compile([executor], [root])?;
    tonic_prost_build::configure().build_server(false).compile_fds(files)?;
    Ok(())
}
