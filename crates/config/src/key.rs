//! Definition of a key. Generic, because `serve`, `forward` and a rule each have a table of keys.

use std::{collections::BTreeMap, fmt::Write as _};

use turnpike_strict::{Value, ValueNode};

use super::{Checks, Mistake, Origin, read::ValueReader};

pub(crate) struct KeySpec<S> {
    pub(crate) path: &'static str,
    /// Text that completes "expected ..." in error messages.
    pub(crate) expected: &'static str,
    /// True for a list: flags can be repeated, and environment variables are split at commas.
    pub(crate) list: bool,
    pub(crate) secret: bool,
    pub(crate) reload: bool,
    /// Reads a value into the settings; `None` if it is invalid.
    pub(crate) apply: fn(&mut ValueReader<'_>, &ValueNode, &mut S) -> Option<()>,
    /// Formats the effective value as TOML, with secrets masked.
    pub(crate) show: fn(&S) -> String,
    /// Compares values, including secrets, whose displayed form is always the same.
    pub(crate) differs: fn(&S, &S) -> bool,
    /// Copies the value from the first settings to the second, if the key is a field.
    pub(crate) keep: fn(&S, &mut S),
}

impl<S> KeySpec<S> {
    /// Reads its value into the settings; `None` if it is invalid. Errors go to `problems`.
    pub(crate) fn read(
        &self,
        node: &ValueNode,
        settings: &mut S,
        checks: Checks,
        problems: &mut Vec<Mistake>,
    ) -> Option<()> {
        (self.apply)(
            &mut ValueReader::new((self.path, self.expected, self.secret), checks, problems),
            node,
            settings,
        )
    }

    pub(crate) fn section(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(section, _)| section)
    }

    pub(crate) fn name(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, name)| name)
    }

    pub(crate) fn variables(&self) -> [String; 2] {
        variables(self.path)
    }
}

/// Name of the environment variable for a key.
pub(crate) fn variable(path: &str) -> String {
    format!("TURNPIKE_{}", path.replace('.', "_").to_uppercase())
}

/// Names of the variables for a key's value and for a file that contains it.
pub(crate) fn variables(path: &str) -> [String; 2] {
    let name = variable(path);
    let file = format!("{name}_FILE");
    [name, file]
}

pub(crate) struct ValueKind<T> {
    pub(crate) expected: &'static str,
    pub(crate) list: bool,
    pub(crate) secret: bool,
    pub(crate) read: fn(&mut ValueReader<'_>, &ValueNode) -> Option<T>,
    /// Inverse of `read`: formats a value as TOML.
    pub(crate) show: fn(&T) -> String,
}

impl<T> ValueKind<T> {
    pub(crate) const fn one(
        expected: &'static str,
        read: fn(&mut ValueReader<'_>, &ValueNode) -> Option<T>,
        show: fn(&T) -> String,
    ) -> Self {
        Self { expected, list: false, secret: false, read, show }
    }

    pub(crate) const fn list(
        expected: &'static str,
        read: fn(&mut ValueReader<'_>, &ValueNode) -> Option<T>,
        show: fn(&T) -> String,
    ) -> Self {
        Self { expected, list: true, secret: false, read, show }
    }

    pub(crate) const fn secret(self) -> Self {
        let Self { expected, list, read, show, .. } = self;
        Self { expected, list, secret: true, read, show }
    }
}

macro_rules! list_of {
    ($expected:expr, $parse:expr) => {
        $crate::key::ValueKind::list(
            $expected,
            |reader, node| reader.list(node, |reader, node| reader.parsed(node, $parse)),
            |items| turnpike_convert::toml_text::strings(items),
        )
    };
}
pub(crate) use list_of;

macro_rules! text {
    ($expected:literal, $is_right:expr) => {
        $crate::key::ValueKind::one(
            $expected,
            |reader, node| {
                let text = reader.text(node)?;
                let is_right: fn(&str) -> bool = $is_right;
                if is_right(&text) { Some(text) } else { reader.refuse(node, None) }
            },
            |text: &String| turnpike_convert::toml_text::quoted(text),
        )
    };
}
pub(crate) use text;

macro_rules! number {
    ($type:ty, $what:literal, $least:literal..=$most:literal) => {
        $crate::key::ValueKind::<$type>::one(
            concat!($what, ", ", $least, " to ", $most),
            |reader, node| reader.integer(node, &($least..=$most)),
            ToString::to_string,
        )
    };
}
pub(crate) use number;

macro_rules! number_or_none {
    ($type:ty, $what:literal, $least:literal..=$most:literal) => {
        $crate::key::ValueKind::<Option<$type>>::one(
            concat!($what, ", ", $least, " to ", $most, ", or \"none\""),
            |reader, node| match &node.value {
                turnpike_strict::Value::Text(text) if **text == "none" => Some(None),
                _ => reader.integer(node, &($least..=$most)).map(Some),
            },
            |value| {
                value.map_or_else(|| turnpike_convert::toml_text::quoted("none"), |value| value.to_string())
            },
        )
    };
}
pub(crate) use number_or_none;

macro_rules! seconds {
    ($least:literal..=$most:literal) => {
        $crate::key::ValueKind::<std::time::Duration>::one(
            concat!("seconds, ", $least, " to ", $most),
            |reader, node| reader.integer(node, &($least..=$most)).map(std::time::Duration::from_secs),
            |time| time.as_secs().to_string(),
        )
    };
}
pub(crate) use seconds;

/// [`ValueKind`] of an enumeration with named values.
macro_rules! named {
    ($expected:literal, $($name:literal => $value:path),+ $(,)?) => {
        $crate::key::ValueKind::one(
            $expected,
            |reader, node| {
                reader.parsed(node, |text| match text {
                    $($name => Ok($value),)+
                    _ => Err(""),
                })
            },
            |value| {
                turnpike_convert::toml_text::quoted(match value {
                    $($value => $name,)+
                })
            },
        )
    };
}
pub(crate) use named;

/// A key that is not a field: neither a list nor a secret, applied by a reload.
macro_rules! scalar {
    ($path:literal, $expected:expr, $apply:expr, $show:expr $(,)?) => {
        $crate::key::KeySpec {
            path: $path,
            expected: $expected,
            list: false,
            secret: false,
            reload: true,
            apply: $apply,
            show: $show,
            differs: |one, other| $crate::key::are_shown_otherwise(one, other, $show),
            keep: |_, _| {},
        }
    };
}
pub(crate) use scalar;

/// A key that is one field, of a [`ValueKind`], applied by a reload (`reload`) or only at startup (`start`).
/// Text after `=>` replaces the kind's expected form.
macro_rules! field {
    (start $($rest:tt)+) => { $crate::key::field!(@ false, $($rest)+) };
    (reload $($rest:tt)+) => { $crate::key::field!(@ true, $($rest)+) };
    (@ $reload:literal, $path:literal, $($field:ident).+, $kind:expr) => {
        $crate::key::field!(@ $reload, $path, $($field).+, $kind => ($kind).expected)
    };
    (@ $reload:literal, $path:literal, $($field:ident).+, $kind:expr => $expected:expr) => {
        $crate::key::KeySpec {
            path: const { $crate::key::named_like($path, stringify!($($field).+)) },
            expected: $expected,
            list: ($kind).list,
            secret: ($kind).secret,
            reload: $reload,
            apply: |reader, node, settings| {
                settings.$($field).+ = (($kind).read)(reader, node)?;
                Some(())
            },
            show: |settings| (($kind).show)(&settings.$($field).+),
            differs: |one, other| one.$($field).+ != other.$($field).+,
            keep: |one, other| other.$($field).+ = one.$($field).+.clone(),
        }
    };
}
pub(crate) use field;

/// Returns `path`. Its last segment must be the name of the field or, for a repeated key such as
/// `[[oauth.key]]`, its singular.
pub(crate) const fn named_like(path: &'static str, field: &str) -> &'static str {
    let (path_bytes, field_bytes) = (path.as_bytes(), field.as_bytes());
    let (mut in_path, mut in_field) = (path_bytes.len(), field_bytes.len());
    if field_bytes[in_field - 1] == b's' && path_bytes[in_path - 1] != b's' {
        in_field -= 1;
    }
    while in_field > 0 && !matches!(field_bytes[in_field - 1], b'.' | b' ') {
        assert!(field_bytes[in_field - 1] == path_bytes[in_path - 1], "key and field have different names");
        (in_path, in_field) = (in_path - 1, in_field - 1);
    }
    assert!(path_bytes[in_path - 1] == b'.', "key and field have different names");
    path
}

/// Defines settings and the table of their keys, each a [`field!`]. A field without a key is set by other
/// means.
macro_rules! settings {
    (
        $(#[$about:meta])*
        $name:ident by $keys:ident {
            $(
                $(#[$doc:meta])*
                $field:ident: $type:ty = $default:expr
                    $(, $when:ident $path:literal $(.$part:ident)* $kind:expr $(=> $expected:expr)?)*;
            )+
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        /// All keys, section by section, in display order.
        pub(crate) static $keys: &[$crate::key::KeySpec<$name>] = &[
            $($($crate::key::field!($when $path, $field $(.$part)*, $kind $(=> $expected)?),)*)+
        ];
    };
}
pub(crate) use settings;

/// The settings as a TOML file with each value's origin. Secrets are masked, and keys in `capped` are
/// commented out.
pub(crate) fn table_as_toml<S>(
    keys: &[KeySpec<S>],
    settings: &S,
    origins: &BTreeMap<&'static str, Origin>,
    capped: &[&str],
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
        let comment = if capped.contains(&spec.path) { "# " } else { "" };
        let _ = writeln!(text, "{comment}{} = {} # {origin}", spec.name(), (spec.show)(settings));
    }
    text
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyChange {
    pub key: &'static str,
    pub values: Option<(String, String)>,
}

pub(crate) fn changes<S>(keys: &[KeySpec<S>], old: &S, new: &S) -> Vec<KeyChange> {
    let differing = keys.iter().filter(|spec| spec.reload && (spec.differs)(old, new));
    let change = |spec: &KeySpec<S>| KeyChange {
        key: spec.path,
        values: (!spec.secret).then(|| ((spec.show)(old), (spec.show)(new))),
    };
    differing.map(change).collect()
}

pub(crate) fn unchangeable<S>(keys: &[KeySpec<S>], old: &S, new: &S) -> Vec<&'static str> {
    let differing = keys.iter().filter(|spec| !spec.reload && (spec.differs)(old, new));
    differing.map(|spec| spec.path).collect()
}

pub(crate) fn are_shown_otherwise<S>(one: &S, other: &S, show: fn(&S) -> String) -> bool {
    show(one) != show(other)
}

pub(crate) mod kind {
    use std::{net::IpAddr, path::PathBuf};

    use turnpike_convert::toml_text::quoted;

    use super::{Value, ValueKind};
    use turnpike_wire::names::server_name;

    use crate::LogFormat;

    pub(crate) const SWITCH: ValueKind<bool> =
        ValueKind::one("true or false", |reader, node| reader.boolean(node), bool::to_string);

    /// Number of threads; `None` means one per core.
    pub(crate) const WORKERS: ValueKind<Option<usize>> = ValueKind::one(
        "a number of threads, 1 to 1024, or \"auto\" for one per core",
        |reader, node| match &node.value {
            Value::Text(text) if **text == "auto" => Some(None),
            _ => reader.integer(node, &(1..=1024)).map(Some),
        },
        |workers| workers.map_or_else(|| quoted("auto"), |workers| workers.to_string()),
    );

    pub(crate) const FILE: ValueKind<Option<PathBuf>> = ValueKind::one(
        "the path of a file, or \"\" for none",
        |reader, node| reader.text(node).map(|path| (!path.is_empty()).then(|| PathBuf::from(path))),
        |path| quoted(&path.as_ref().map_or_else(String::new, |path| path.display().to_string())),
    );

    pub(crate) const HOSTS: ValueKind<Vec<String>> = list_of!(
        "a list of host names without ports, such as [\"turn.example.org\"]; addresses and localhost are served anyway",
        |text| match text.parse::<IpAddr>() {
            Ok(_) => Err("addresses are always accepted and need no entry"),
            Err(_) => server_name(text.strip_suffix('.').unwrap_or(text)),
        }
    );

    pub(crate) const LOG_LEVEL: ValueKind<String> = ValueKind::one(
        "error, warn, info, debug, trace, off, or a filter such as \"info,turnpike_relay=debug\"",
        |reader, node| {
            let check = reader.checks.log_filter;
            reader.parsed(node, |text| check(text).map(|()| text.to_owned()))
        },
        |filter| quoted(filter),
    );

    pub(crate) const LOG_FORMAT: ValueKind<LogFormat> = named!(
        "\"text\", \"json\" or \"journald\"",
        "text" => LogFormat::Text,
        "json" => LogFormat::Json,
        "journald" => LogFormat::Journald,
    );
}
