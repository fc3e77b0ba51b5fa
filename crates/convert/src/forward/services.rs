//! Service names (services(5)), read from the file, because getservbyname(3) would require a foreign
//! function call.

use std::{fs, path::Path};

#[derive(Clone, Debug, Default)]
pub struct Services(Vec<NamedService>);

#[derive(Clone, Debug)]
struct NamedService {
    name: String,
    port: u16,
    transport: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceProtocol {
    Tcp,
    Udp,
}

impl ServiceProtocol {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl Services {
    pub fn of_this_machine() -> Self {
        Self::read(Path::new("/etc/services"))
    }

    fn read(path: &Path) -> Self {
        // Read as bytes: comments in old files are not always UTF-8.
        fs::read(path).map_or_else(|_| Self::default(), |bytes| Self::parse(&String::from_utf8_lossy(&bytes)))
    }

    /// Ignores invalid lines, like the C library.
    pub fn parse(text: &str) -> Self {
        let mut services = Vec::new();
        for line in text.lines() {
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let (Some(name), Some(port)) = (words.next(), words.next()) else { continue };
            let Some((port, transport)) = port.split_once('/') else { continue };
            let Ok(port) = port.parse() else { continue };
            services.extend([name].into_iter().chain(words).map(|name| NamedService {
                name: name.to_owned(),
                port,
                transport: transport.to_owned(),
            }));
        }
        Self(services)
    }

    pub fn port(&self, name: &str, transport: ServiceProtocol) -> Option<u16> {
        let fits = |service: &&NamedService| service.name == name && service.transport == transport.name();
        self.0.iter().find(fits).map(|service| service.port)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|service| service.name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_found_by_name_alias_and_transport() {
        let services = Services::parse(
            "# header\nhttp\t80/tcp\twww # WorldWideWeb HTTP\n\ndomain 53/udp\ndomain 53/tcp\nbroken\nbad x/tcp\n",
        );
        assert_eq!(services.port("http", ServiceProtocol::Tcp), Some(80));
        assert_eq!(services.port("www", ServiceProtocol::Tcp), Some(80));
        assert_eq!(services.port("http", ServiceProtocol::Udp), None);
        assert_eq!(services.port("domain", ServiceProtocol::Udp), Some(53));
        assert_eq!(services.port("bad", ServiceProtocol::Tcp), None);
        assert_eq!(services.port("header", ServiceProtocol::Tcp), None);
    }

    #[test]
    fn missing_services_file_is_an_empty_table() {
        assert_eq!(Services::read(Path::new("/nowhere/services")).names().count(), 0);
    }
}
