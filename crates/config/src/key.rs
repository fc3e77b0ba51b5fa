//! What a key is: its name, what is expected, how it is read, how it is shown. Generic over what it is read into, because
//! `serve`, `forward` and a single forwarding rule each have a table of keys and work alike.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{
    Origin,
    read::Reader,
    source::{Node, Value},
};

/// One key of a table that is read into an `S`.
pub(crate) struct KeySpec<S> {
    /// `section.key`.
    pub(crate) path: &'static str,
    /// Completes "expected ...".
    pub(crate) expected: &'static str,
    /// Flags repeat and environment variables are split at commas.
    pub(crate) list: bool,
    /// Its value must not be shown, and `TURNPIKE_..._FILE` works.
    pub(crate) secret: bool,
    /// Whether a reload applies it.
    pub(crate) reload: bool,
    /// Reads a value into the settings; whether that worked.
    pub(crate) apply: fn(&mut Reader<'_>, &Node, &mut S) -> Option<()>,
    /// The effective value as TOML, secrets masked.
    pub(crate) show: fn(&S) -> String,
}

impl<S> KeySpec<S> {
    pub(crate) fn section(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(section, _)| section)
    }

    pub(crate) fn name(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, name)| name)
    }

    pub(crate) fn variable(&self) -> String {
        format!("TURNPIKE_{}", self.path.replace('.', "_").to_uppercase())
    }

    /// The names of its environment variables.
    pub(crate) fn variables(&self) -> Vec<String> {
        let name = self.variable();
        let file = self.secret.then(|| format!("{name}_FILE"));
        [Some(name), file].into_iter().flatten().collect()
    }
}

/// What keys of one kind have in common: of one table, and of several.
pub(crate) struct Kind<T> {
    /// As [`KeySpec::expected`].
    pub(crate) expected: &'static str,
    /// As [`KeySpec::list`].
    pub(crate) list: bool,
    /// As [`KeySpec::secret`].
    pub(crate) secret: bool,
    pub(crate) read: fn(&mut Reader<'_>, &Node) -> Option<T>,
    /// The opposite of `read`: a value as TOML.
    pub(crate) show: fn(&T) -> String,
}

/// A key that is no list and no secret; `reload` as given.
macro_rules! scalar {
    ($path:literal, reload: $reload:literal, $expected:expr, $apply:expr, $show:expr $(,)?) => {
        $crate::key::KeySpec {
            path: $path,
            expected: $expected,
            list: false,
            secret: false,
            reload: $reload,
            apply: $apply,
            show: $show,
        }
    };
}
pub(crate) use scalar;

/// A key whose value is one field, of a [`Kind`]; `expected` where that of the kind does not say enough.
macro_rules! field {
    ($path:literal, reload: $reload:literal, $kind:path, $($field:ident).+) => {
        $crate::key::field!($path, reload: $reload, $kind, $($field).+, expected: $kind.expected)
    };
    ($path:literal, reload: $reload:literal, $kind:path, $($field:ident).+, expected: $expected:expr $(,)?) => {
        $crate::key::KeySpec {
            path: $path,
            expected: $expected,
            list: $kind.list,
            secret: $kind.secret,
            reload: $reload,
            apply: |reader, node, settings| {
                settings.$($field).+ = ($kind.read)(reader, node)?;
                Some(())
            },
            show: |settings| ($kind.show)(&settings.$($field).+),
        }
    };
}
pub(crate) use field;

/// A key whose value is one field, a whole number within bounds; `$what` says of what.
macro_rules! number {
    ($path:literal, reload: $reload:literal, $what:literal, $least:literal..=$most:literal, $($field:ident).+) => {
        $crate::key::scalar!(
            $path,
            reload: $reload,
            concat!($what, ", ", $least, " to ", $most),
            |reader, node, settings| {
                settings.$($field).+ = reader.integer(node, &($least..=$most))?;
                Some(())
            },
            |settings| settings.$($field).+.to_string(),
        )
    };
}
pub(crate) use number;

/// The [`Kind`] of a value that has few, each with a name.
macro_rules! named {
    ($expected:literal, $($name:literal => $value:path),+ $(,)?) => {
        $crate::key::Kind {
            expected: $expected,
            list: false,
            secret: false,
            read: |reader, node| {
                reader.parsed(node, |text| match text {
                    $($name => Ok($value),)+
                    _ => Err(""),
                })
            },
            show: |value| {
                $crate::key::show::quoted(match value {
                    $($value => $name,)+
                })
            },
        }
    };
}
pub(crate) use named;

/// The settings as a TOML file with each value's origin, secrets masked.
pub(crate) fn table_as_toml<S>(
    keys: &[KeySpec<S>],
    settings: &S,
    origins: &BTreeMap<&'static str, Origin>,
) -> String {
    let mut text = String::new();
    let mut section = "";
    for spec in keys {
        if spec.section() != section {
            let gap = if section.is_empty() { "" } else { "\n" };
            section = spec.section();
            let _ = writeln!(text, "{gap}[{section}]");
        }
        let origin = origins.get(spec.path).unwrap_or(&Origin::Default);
        let _ = writeln!(text, "{} = {} # {origin}", spec.name(), (spec.show)(settings));
    }
    text
}

/// Keys whose value differs, but which a running program cannot change.
pub(crate) fn unchangeable<S>(keys: &[KeySpec<S>], old: &S, new: &S) -> Vec<&'static str> {
    keys.iter()
        .filter(|spec| !spec.reload && (spec.show)(old) != (spec.show)(new))
        .map(|spec| spec.path)
        .collect()
}

/// Keys that a reload applies and whose shown value differs. Secret keys are not among them: their values are all shown alike.
pub(crate) fn changed<S>(keys: &[KeySpec<S>], old: &S, new: &S) -> Vec<&'static str> {
    keys.iter()
        .filter(|spec| spec.reload && !spec.secret && (spec.show)(old) != (spec.show)(new))
        .map(|spec| spec.path)
        .collect()
}

/// Kinds that more than one table has.
pub(crate) mod kind {
    use std::{net::IpAddr, path::PathBuf};

    use turnpike_net::Datapath;

    use super::{
        Kind, Value,
        show::{quoted, strings},
    };
    use crate::{LogFormat, realm_keys::server_name};

    pub(crate) const SWITCH: Kind<bool> = Kind {
        expected: "true or false",
        list: false,
        secret: false,
        read: |reader, node| reader.boolean(node),
        show: bool::to_string,
    };

    /// A number of threads; `None` is one per core.
    pub(crate) const WORKERS: Kind<Option<usize>> = Kind {
        expected: "a number of threads, 1 to 1024, or \"auto\" for one per core",
        list: false,
        secret: false,
        read: |reader, node| match &node.value {
            Value::Text(text) if **text == "auto" => Some(None),
            _ => reader.integer(node, &(1..=1024)).map(Some),
        },
        show: |workers| workers.map_or_else(|| quoted("auto"), |workers| workers.to_string()),
    };

    /// A step of the ladder; `None` is the best one.
    pub(crate) const DATAPATH: Kind<Option<Datapath>> = Kind {
        expected: "\"auto\", \"basic\", \"mmsg\" or \"gso\"",
        list: false,
        secret: false,
        read: |reader, node| {
            reader.parsed(node, |text| match text {
                // `Datapath::from_str("auto")` asks the kernel, and nothing here may open a socket.
                "auto" => Ok(None),
                other => other.parse().map(Some).map_err(|_| ""),
            })
        },
        show: |datapath| datapath.map_or_else(|| quoted("auto"), |step| quoted(&step.to_string())),
    };

    /// The path of a file as it stands, "" for none.
    pub(crate) const FILE: Kind<Option<PathBuf>> = Kind {
        expected: "the path of a file, \"\" for none",
        list: false,
        secret: false,
        read: |reader, node| reader.text(node).map(|path| (!path.is_empty()).then(|| PathBuf::from(path))),
        show: |path| quoted(&path.as_ref().map_or_else(String::new, |path| path.display().to_string())),
    };

    /// Names under which the admin interface may be asked for.
    pub(crate) const HOSTS: Kind<Vec<String>> = Kind {
        expected: "a list of host names without ports, such as [\"turn.example.org\"]; addresses and localhost are served anyway",
        list: true,
        secret: false,
        read: |reader, node| {
            reader.list(node, |reader, node| {
                reader.parsed(node, |text| match text.parse::<IpAddr>() {
                    Ok(_) => Err("an address is served without being named"),
                    Err(_) => server_name(text.strip_suffix('.').unwrap_or(text)),
                })
            })
        },
        show: |names| strings(names),
    };

    /// A filter of log lines.
    pub(crate) const LOG_LEVEL: Kind<String> = Kind {
        expected: "error, warn, info, debug, trace, off, or a filter such as \"info,turnpike_relay=debug\"",
        list: false,
        secret: false,
        read: |reader, node| {
            reader.parsed(node, |text| crate::log_filter::check_filter(text).map(|()| text.to_owned()))
        },
        show: |filter| quoted(filter),
    };

    /// How log lines look.
    pub(crate) const LOG_FORMAT: Kind<LogFormat> =
        named!("\"text\" or \"json\"", "text" => LogFormat::Text, "json" => LogFormat::Json);
}

/// Values as TOML.
pub(crate) mod show {
    pub(crate) fn strings<T: ToString>(items: &[T]) -> String {
        list(items.iter().map(|item| quoted(&item.to_string())))
    }

    pub(crate) fn list(items: impl Iterator<Item = String>) -> String {
        format!("[{}]", items.collect::<Vec<_>>().join(", "))
    }

    pub(crate) fn quoted(text: &str) -> String {
        toml::Value::String(text.to_owned()).to_string()
    }
}
