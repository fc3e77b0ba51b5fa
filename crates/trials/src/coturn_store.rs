//! Test database with coturn's schema.

use std::process::Command;

use turnpike_testkit::databases::{PASSWORD, Proxy, Server, installed};

use super::Program;

pub fn coturn_store() -> Result<(Server, Proxy), String> {
    let server = Server::postgres()?;
    let proxy = Proxy::new(server.address);
    let document = include_str!("../../../docs/stores.md");
    let (_, rest) = document.split_once("```sql\n").expect("the document has the schema");
    let psql = installed("psql").ok_or("psql is not installed")?;
    let schema = rest.split_once("```").expect("the code block ends").0;
    Program::run(Command::new(psql).env("PGPASSWORD", PASSWORD).args([
        "-X",
        "-q",
        "-v",
        "ON_ERROR_STOP=1",
        "-d",
        &server.coturn_words(),
        "-c",
        schema,
    ]))
    .ended(0);
    Ok((server, proxy))
}
