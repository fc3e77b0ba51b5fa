//! `print-firewall` output is accepted by nft and iptables, in a network namespace.

use crate::prelude::*;

const CONFIG: &str = "\
[server]
listen = [\"0.0.0.0:3478\", \"[::]:3478\", \"203.0.113.5:443\", \"[2001:db8::5]:443\"]
[relay]
addresses = [\"203.0.113.5\", \"2001:db8::5\"]
ports = \"50000-50999\"
[auth]
users = [\"alice:secret\"]
[nat_discovery]
addresses = [\"203.0.113.5\", \"203.0.113.6\"]
";

const RULES: &str = "\
[[rule]]
name = \"it's; $(reboot)\"
listen = \"0.0.0.0:9000-9010\"
target = \"10.0.0.2:9000-9010\"
[[rule]]
protocol = \"udp\"
listen = \"[::]:53\"
target = \"10.0.0.3:53\"
";

fn printed(arguments: &[&str]) -> String {
    let run = Program::run(turnpike(&["print-firewall"]).args(arguments));
    assert_eq!(run.code, Some(0), "{arguments:?}: {}", run.output());
    run.stdout
}

fn both(dir: &Dir, format: &str) -> [String; 2] {
    let (server, rules) = (dir.file("turnpike.toml", CONFIG), dir.file("forward.toml", RULES));
    let [server, rules] = [&server, &rules].map(|path| path.to_str().expect("UTF-8"));
    [printed(&["-c", server, "--format", format]), printed(&["--forward", rules, "--format", format])]
}

fn said(program: &str, arguments: &[&str]) -> String {
    let path = installed(program).unwrap_or_else(|_| program.into());
    let output = Command::new(path).args(arguments).output().expect("the program starts");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn nft_rules_load_repeatedly_without_duplicates() {
    let nft = need!(installed("nft"));
    let nft = nft.to_str().expect("UTF-8");
    alone::in_namespaces(turnpike_testkit::this_test!(), "n", &[nft, "list", "ruleset"], || {
        let dir = Dir::new();
        for (number, rules) in both(&dir, "nftables").iter().enumerate() {
            let file = dir.file("rules.nft", rules);
            let file = file.to_str().expect("UTF-8");
            said("nft", &["-c", "-f", file]);
            assert!(!said("nft", &["list", "ruleset"]).contains("dport") || number > 0, "-c only checks");
            (0..2).for_each(|_| _ = said("nft", &["-f", file]));
            let loaded = said("nft", &["list", "chain", "inet", "filter", "turnpike"]);
            let count = |text: &str| text.matches("accept").count();
            assert_eq!(count(&loaded), count(rules), "{loaded}\n{rules}");
            assert!(count(rules) > 1, "{rules}");
        }
    });
}

#[test]
fn iptables_script_runs_repeatedly_without_duplicates() {
    let iptables = need!(installed("iptables"));
    let probe = [iptables.to_str().expect("UTF-8"), "-w", "-S"];
    alone::in_namespaces(turnpike_testkit::this_test!(), "n", &probe, || {
        let dir = Dir::new();
        for script in both(&dir, "iptables") {
            let file = dir.file("rules.sh", &script);
            (0..2).for_each(|_| _ = said("sh", &[file.to_str().expect("UTF-8")]));
            for program in ["iptables", "ip6tables"] {
                let loaded = said(program, &["-w", "-S"]);
                let wanted =
                    script.lines().filter(|line| line.starts_with(&format!("{program} -w -A"))).count();
                assert_eq!(loaded.matches("-A TURNPIKE").count(), wanted, "{loaded}\n{script}");
                assert!(wanted > 0, "{script}");
                assert_eq!(loaded.matches("-A INPUT -j TURNPIKE").count(), 1, "{loaded}");
            }
        }
    });
}

#[test]
fn every_format_except_nft_is_a_valid_shell_script() {
    let dir = Dir::new();
    for format in ["iptables", "ufw", "aws", "gcp"] {
        for script in both(&dir, format) {
            let file = dir.file("script", &script);
            said("sh", &["-n", file.to_str().expect("UTF-8")]);
            assert!(script.lines().any(|line| !line.starts_with('#')), "{format}: {script}");
        }
    }
}

#[test]
fn aws_permissions_are_json_without_duplicates() {
    let dir = Dir::new();
    let [server, _] = both(&dir, "aws");
    let (_, permissions) = server.split_once("--ip-permissions '").expect("an argument");
    let (permissions, _) = permissions.split_once('\'').expect("its end");
    let permissions: Vec<Value> = serde_json::from_str(permissions).expect("JSON");
    let mut seen = std::collections::BTreeSet::new();
    for permission in &permissions {
        let ports = (&permission["FromPort"], &permission["ToPort"]);
        assert!(seen.insert(format!("{} {ports:?}", permission["IpProtocol"])), "{permission} twice");
        assert_eq!(permission["IpRanges"][0]["CidrIp"], "0.0.0.0/0", "{permission}");
    }
    let relay = permissions.iter().filter(|permission| permission["ToPort"] == 50_999).count();
    assert_eq!(relay, 2, "UDP and TCP: {permissions:?}");
}

#[test]
fn invalid_configuration_prints_errors_and_no_rules() {
    let run = Program::run(&mut turnpike(&["print-firewall", "--relay-ports", "9-1"]));
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{}", run.output());
    assert!(run.stderr.contains("--relay-ports"), "{}", run.stderr);
}
