//! Controls browsers from tests: Chromium through the DevTools protocol over a pair of pipes, Firefox through Marionette. Both protocols
//! are built into the browsers.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    net::TcpStream,
    process::Command,
    sync::mpsc::{self, Receiver},
    thread,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use super::browser::{chromium, firefox};
use crate::{Dir, Program, SOON, eventually, installed};

pub trait Driver: Sized {
    const NAME: &'static str;

    fn available() -> Result<(), String>;

    fn start() -> Self;

    fn go(&mut self, url: &str);

    /// Runs the body of an asynchronous function in the page and returns its result.
    fn run(&mut self, script: &str) -> Value;

    fn show(&mut self, width: u32, height: u32, dark: bool);

    fn press(&mut self, key: &str);

    fn picture(&mut self) -> Vec<u8>;
}

pub struct Devtools {
    commands: File,
    answers: Receiver<Value>,
    session: Option<String>,
    last: u64,
    _program: Program,
    _home: Dir,
}

impl Devtools {
    fn ask(&mut self, method: &str, parameters: Value) -> Value {
        self.last += 1;
        let mut command = json!({ "id": self.last, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        let bytes = [command.to_string().as_bytes(), b"\0"].concat();
        self.commands.write_all(&bytes).expect("Chromium accepts commands");
        loop {
            let answer = self.answers.recv_timeout(SOON).unwrap_or_else(|_| panic!("{method}: no answer"));
            if answer["id"] == self.last {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }
}

impl Driver for Devtools {
    const NAME: &'static str = "Chromium";

    fn available() -> Result<(), String> {
        installed("chromium")?;
        installed("mkfifo").map(drop)
    }

    fn start() -> Self {
        let home = Dir::new();
        let pipes = ["commands", "answers"].map(|name| home.path().join(name));
        assert!(Command::new("mkfifo").args(&pipes).status().expect("the browser is installed").success());
        let mut browser = chromium(&home);
        browser.args(["--remote-debugging-pipe", "--hide-scrollbars", "about:blank"]);
        // A shell can pass descriptors above 2 to a child; `Command` cannot.
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg("in=$1 out=$2; shift 2; exec \"$@\" 3<\"$in\" 4>\"$out\"")
            .arg("sh")
            .args(&pipes);
        command.arg(browser.get_program()).args(browser.get_args());
        for (name, value) in browser.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let program = Program::start(&mut command);
        // Opening a FIFO blocks until its other end has been opened too.
        let commands = OpenOptions::new().write(true).open(&pipes[0]).expect("a pipe");
        let mut output = File::open(&pipes[1]).expect("a pipe");
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            let mut held = Vec::new();
            let mut piece = vec![0; 1 << 16];
            while let Ok(length) = output.read(&mut piece) {
                if length == 0 {
                    return;
                }
                held.extend_from_slice(&piece[..length]);
                while let Some(end) = held.iter().position(|byte| *byte == 0) {
                    let message: Vec<u8> = held.drain(..=end).collect();
                    let Ok(message) = serde_json::from_slice(&message[..end]) else { return };
                    if sender.send(message).is_err() {
                        return;
                    }
                }
            }
        });
        let mut driver = Self { commands, answers, session: None, last: 0, _program: program, _home: home };
        let target = eventually("a page", || {
            let targets = driver.ask("Target.getTargets", json!({}));
            let pages = targets["targetInfos"].as_array()?.iter();
            pages.clone().find(|target| target["type"] == "page").map(|target| target["targetId"].clone())
        });
        let attached = driver.ask("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        driver.session = attached["sessionId"].as_str().map(str::to_owned);
        driver.ask("Page.enable", json!({}));
        driver
    }

    fn go(&mut self, url: &str) {
        let went = self.ask("Page.navigate", json!({ "url": url }));
        assert!(went.get("errorText").is_none(), "{url}: {went}");
        eventually("the page has loaded", || {
            let state = self.run("return [document.readyState, location.href]");
            state[0] == "complete" && state[1] != "about:blank"
        });
    }

    fn run(&mut self, script: &str) -> Value {
        let expression = format!("(async () => {{ {script} }})()");
        let parameters = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let ran = self.ask("Runtime.evaluate", parameters);
        let short: String = script.chars().rev().take(300).collect::<Vec<_>>().into_iter().rev().collect();
        assert!(ran.get("exceptionDetails").is_none(), "{short}: {ran}");
        ran["result"]["value"].clone()
    }

    fn show(&mut self, width: u32, height: u32, dark: bool) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.ask("Emulation.setDeviceMetricsOverride", size);
        let value = if dark { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": value }]);
        self.ask("Emulation.setEmulatedMedia", json!({ "features": features }));
    }

    fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            other => panic!("{other}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.ask("Input.dispatchKeyEvent", event);
        }
    }

    fn picture(&mut self) -> Vec<u8> {
        let taken =
            self.ask("Page.captureScreenshot", json!({ "format": "png", "captureBeyondViewport": true }));
        STANDARD.decode(taken["data"].as_str().expect("a picture")).expect("base64")
    }
}

pub struct Marionette {
    stream: TcpStream,
    last: u64,
    _program: Program,
    _home: Dir,
}

impl Marionette {
    fn ask(&mut self, method: &str, parameters: Value) -> Value {
        self.last += 1;
        let command = json!([0, self.last, method, parameters]).to_string();
        let framed = format!("{}:{command}", command.len());
        self.stream.write_all(framed.as_bytes()).expect("Firefox accepts commands");
        let answer = hear(&mut self.stream);
        assert_eq!(answer[1], self.last, "{method}: {answer}");
        assert!(answer[2].is_null(), "{method}: {}", answer[2]);
        answer[3].clone()
    }

    fn run_in(&mut self, script: &str) -> Value {
        let parameters = json!({ "script": script, "args": [], "scriptTimeout": 120_000 });
        self.ask("WebDriver:ExecuteScript", parameters)["value"].clone()
    }
}

/// Reads one message, which consists of a length, a colon and JSON.
fn hear(stream: &mut TcpStream) -> Value {
    let mut length = 0;
    loop {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("Firefox answers");
        match byte[0] {
            b':' => break,
            digit => length = 10 * length + usize::from(digit - b'0'),
        }
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).expect("Firefox answers");
    serde_json::from_slice(&message).expect("JSON")
}

impl Driver for Marionette {
    const NAME: &'static str = "Firefox";

    fn available() -> Result<(), String> {
        installed("firefox-esr").map(drop)
    }

    fn start() -> Self {
        let home = Dir::new();
        // Port 0: Firefox picks a free port and writes it to its profile.
        let mut command = firefox(&home, &[("marionette.port", "0")]);
        // Newer versions let a test change the preference for the colour scheme only with
        // --remote-allow-system-access.
        let program =
            Program::start(command.args(["--marionette", "--remote-allow-system-access", "about:blank"]));
        let port: u16 = eventually("Firefox has written its port", || {
            fs::read_to_string(home.path().join("MarionetteActivePort")).ok()?.trim().parse().ok()
        });
        let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the listener accepts connections");
        stream.set_read_timeout(Some(3 * SOON)).expect("a socket");
        let greeting = hear(&mut stream);
        assert_eq!(greeting["marionetteProtocol"], 3, "{greeting}");
        let mut driver = Self { stream, last: 0, _program: program, _home: home };
        driver.ask("WebDriver:NewSession", json!({}));
        driver
    }

    fn go(&mut self, url: &str) {
        self.ask("WebDriver:Navigate", json!({ "url": url }));
    }

    fn run(&mut self, script: &str) -> Value {
        self.run_in(&format!("return (async () => {{ {script} }})()"))
    }

    fn show(&mut self, width: u32, height: u32, dark: bool) {
        self.ask("WebDriver:SetWindowRect", json!({ "width": width, "height": height }));
        let value = i32::from(!dark);
        self.ask("Marionette:SetContext", json!({ "value": "chrome" }));
        let name = "layout.css.prefers-color-scheme.content-override";
        self.run_in(&format!("Services.prefs.setIntPref('{name}', {value})"));
        self.ask("Marionette:SetContext", json!({ "value": "content" }));
    }

    fn press(&mut self, key: &str) {
        let value = match key {
            "Tab" => "\u{E004}",
            "Enter" => "\u{E007}",
            "Escape" => "\u{E00C}",
            other => panic!("{other}"),
        };
        let actions = json!([{ "type": "keyDown", "value": value }, { "type": "keyUp", "value": value }]);
        let source = json!({ "type": "key", "id": "keyboard", "actions": actions });
        self.ask("WebDriver:PerformActions", json!({ "actions": [source] }));
    }

    fn picture(&mut self) -> Vec<u8> {
        let taken = self.ask("WebDriver:TakeScreenshot", json!({ "full": true }));
        STANDARD.decode(taken["value"].as_str().expect("a picture")).expect("base64")
    }
}
