//! Names of Unix stream sockets (unix(7)).

use std::{
    fmt, io,
    os::{linux::net::SocketAddrExt as _, unix::net::SocketAddr},
    path::Path,
    str::FromStr,
    sync::Arc,
};

/// Size of `sun_path` minus one: a path ends, and an abstract name begins, with a zero byte.
const LONGEST: usize = 107;

/// Absolute path, or `@` and a name in the abstract namespace, which has no file. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnixName(Arc<str>);

impl FromStr for UnixName {
    type Err = &'static str;

    /// Accepts `/run/app.sock` or `@app`.
    fn from_str(text: &str) -> Result<Self, &'static str> {
        match text.as_bytes() {
            [b'/', _, ..] | [b'@', _, ..] if text.contains('\0') => Err("the name contains a zero byte"),
            [b'/', rest @ ..] if rest.len() >= LONGEST => Err("the path is longer than 107 bytes"),
            [b'@', rest @ ..] if rest.len() > LONGEST => Err("the name is longer than 107 bytes"),
            [b'/', _, ..] | [b'@', _, ..] => Ok(Self(text.into())),
            _ => Err("a Unix socket is an absolute path, or @ and a name"),
        }
    }
}

impl UnixName {
    /// Path of the file; `None` for an abstract name.
    pub fn path(&self) -> Option<&Path> {
        (!self.0.starts_with('@')).then(|| Path::new(&*self.0))
    }

    /// Address for bind(2) and connect(2).
    pub fn address(&self) -> io::Result<SocketAddr> {
        match self.path() {
            Some(path) => SocketAddr::from_pathname(path),
            None => SocketAddr::from_abstract_name(&self.0[1..]),
        }
    }
}

impl fmt::Display for UnixName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_paths_or_abstract_names_of_limited_length() {
        for good in
            ["/run/app.sock", "@app", &format!("/{}", "x".repeat(106)), &format!("@{}", "x".repeat(107))]
        {
            let name = good.parse::<UnixName>().expect(good);
            assert_eq!(name.to_string(), good);
            assert!(name.address().is_ok(), "{good}");
        }
        let long = format!("/{}", "x".repeat(107));
        for bad in ["", "/", "@", "app.sock", "./app.sock", "/a\0b", &long, &format!("@{}", "x".repeat(108))]
        {
            assert!(bad.parse::<UnixName>().is_err(), "{bad:?}");
        }
    }
}
