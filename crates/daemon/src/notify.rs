//! What the service manager is told, where there is one that listens (sd_notify(3)).

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// Where it listens; unset where nobody does.
const SOCKET: &str = "NOTIFY_SOCKET";

/// The service's main process is another one from now on. Only the one before may say so (`NotifyAccess=main`).
pub(crate) fn main_process(id: u32) {
    if let Some(socket) = env::var_os(SOCKET)
        && let Err(error) = send(&socket, &format!("MAINPID={id}"))
    {
        tracing::warn!("cannot tell the service manager that process {id} is the main one: {error}");
    }
}

fn send(socket: &OsStr, text: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
    };
    UnixDatagram::unbound()?.send_to_addr(text.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;

    #[test]
    fn sockets_of_both_kinds_are_told() {
        let dir = Dir::new();
        let path = dir.at("notify");
        let abstract_name = format!("@turnpike-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&abstract_name[1..]).expect("a name");
        for (listening, name) in [
            (UnixDatagram::bind(&path), path.as_os_str()),
            (UnixDatagram::bind_addr(&address), OsStr::new(&abstract_name)),
        ] {
            let listening = listening.expect("it is free");
            send(name, "MAINPID=7").expect("somebody listens");
            let mut buffer = [0; 64];
            let len = listening.recv(&mut buffer).expect("it was sent");
            assert_eq!(&buffer[..len], b"MAINPID=7");
        }
        assert!(send(OsStr::new("/nowhere/at/all"), "x").is_err());
    }
}
