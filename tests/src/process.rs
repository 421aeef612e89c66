//! Brokers as real processes: start, wait until ready, stop, kill, read what they printed.
//!
//! A [`Broker`] owns its process and takes it down when dropped, on a panic too; should the test process itself be
//! killed, the kernel kills the broker. Each broker listens on a loopback address derived from the test's process id,
//! so concurrent tests never race for a port, and a restart finds its old address.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long a broker may take to start or stop before the test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How to start a broker.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The `ringfence` program.
    pub program: PathBuf,
    /// A command and its arguments put before the program (a wrapper that ends in exec).
    pub wrapper: Vec<String>,
    /// `--data-dir`.
    pub data: PathBuf,
    /// Where the native listener binds.
    pub native: SocketAddr,
    /// Where the admin listener binds.
    pub admin: SocketAddr,
    /// `--cores`.
    pub cores: String,
    /// Lines of the configuration file, by key.
    pub config: Vec<(String, String)>,
    /// Folder for the configuration file and the output.
    scratch: PathBuf,
}

impl Setup {
    /// A broker of one shard with its data below `scratch` and addresses of its own.
    #[must_use]
    pub fn new(scratch: &Path) -> Setup {
        Setup::of(program().to_path_buf(), scratch)
    }

    /// The same with a given `ringfence` program.
    #[must_use]
    pub fn of(program: PathBuf, scratch: &Path) -> Setup {
        let ip = own_address();
        let port = next_port();
        Setup {
            program,
            wrapper: Vec::new(),
            data: scratch.join("data"),
            native: SocketAddr::new(ip, port),
            admin: SocketAddr::new(ip, port + 1),
            cores: "1".into(),
            config: Vec::new(),
            scratch: scratch.to_path_buf(),
        }
    }

    /// Adds a line to the configuration file; `value` in TOML syntax.
    #[must_use]
    pub fn config(mut self, key: &str, value: &str) -> Setup {
        self.config.push((key.into(), value.into()));
        self
    }

    /// Another number of shards.
    #[must_use]
    pub fn cores(mut self, cores: &str) -> Setup {
        self.cores = cores.into();
        self
    }

    /// Runs the program below `wrapper`, which must end in exec.
    #[must_use]
    pub fn wrapper(mut self, wrapper: &[&str]) -> Setup {
        self.wrapper = wrapper.iter().map(ToString::to_string).collect();
        self
    }

    /// Starts the process without waiting for anything.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn spawn(&self) -> io::Result<Broker> {
        fs::create_dir_all(&self.scratch)?;
        let config = self.scratch.join("ringfence.toml");
        let lines: String = self.config.iter().map(|(k, v)| format!("{k} = {v}\n")).collect();
        fs::write(&config, lines)?;
        let log = self.scratch.join(format!("broker-{}.log", next_port()));
        let output = File::create(&log)?;
        // setpriv makes the kernel end the broker with the test that started it.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        command.args(&self.wrapper).arg(&self.program).arg("serve");
        command.arg("--data-dir").arg(&self.data);
        command.arg("--native").arg(self.native.to_string());
        command.arg("--admin").arg(self.admin.to_string());
        command.arg("--cores").arg(&self.cores);
        command.arg("--config").arg(&config);
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        Ok(Broker {
            child: command.spawn()?,
            setup: self.clone(),
            log,
        })
    }

    /// Starts the process and waits until it is ready.
    ///
    /// # Panics
    /// When it is not ready in time; with what it printed.
    #[must_use]
    pub fn start(&self) -> Broker {
        let mut broker = self.spawn().expect("the broker's process starts");
        broker.wait_ready();
        broker
    }

    /// Starts a process that is expected to refuse to serve; its exit status and output.
    ///
    /// # Panics
    /// When it does not exit in time.
    #[must_use]
    pub fn refused(&self) -> (ExitStatus, String) {
        let mut broker = self.spawn().expect("the broker's process starts");
        let status = broker.wait_exit();
        (status, broker.output())
    }
}

/// A running broker.
#[derive(Debug)]
pub struct Broker {
    child: Child,
    /// How it was started; starts it again after a kill.
    pub setup: Setup,
    log: PathBuf,
}

impl Broker {
    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed so far.
    #[must_use]
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until `/readyz` answers 200.
    ///
    /// # Panics
    /// When the process exits or the time is up.
    pub fn wait_ready(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if matches!(http_get(self.setup.admin, "/readyz"), Ok((200, _))) {
                return;
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                panic!(
                    "the broker ended with {status} before it was ready:\n{}",
                    self.output()
                );
            }
            assert!(
                Instant::now() < deadline,
                "the broker was not ready in {PATIENCE:?}:\n{}",
                self.output()
            );
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the process ends by itself.
    ///
    /// # Panics
    /// When the time is up.
    pub fn wait_exit(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("the process is our child") {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "the broker did not end in {PATIENCE:?}:\n{}",
                self.output()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// SIGKILL, and the end of the process.
    pub fn kill(&mut self) {
        // Fails only when the process has ended already, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends a signal by name, without waiting for its effect.
    pub fn signal(&self, name: &str) {
        let line = format!("kill -{name} {}", self.pid());
        let status = Command::new("sh").args(["-c", &line]).status();
        assert!(status.is_ok_and(|s| s.success()), "{line}");
    }

    /// SIGTERM; the exit status of the clean stop.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.wait_exit()
    }

    /// Kills it and starts it again on the same data and addresses.
    pub fn kill_and_restart(&mut self) {
        self.kill();
        *self = self.setup.start();
    }

    /// Body of the admin page at `path`.
    ///
    /// # Panics
    /// When it is not answered with 200.
    #[must_use]
    pub fn admin(&self, path: &str) -> String {
        let (status, body) = http_get(self.setup.admin, path).expect("the admin page answers");
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// Sum over all labels of a metric on `/metrics`; 0 when it is not there.
    #[must_use]
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.admin("/metrics");
        let samples = page.lines().filter_map(|line| {
            let (key, value) = line.rsplit_once(' ')?;
            let key = key.split('{').next()?;
            (key == name).then(|| value.parse::<f64>().ok())?
        });
        samples.sum()
    }

    /// User and system time of the process so far.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn cpu_time(&self) -> io::Result<Duration> {
        cpu_time(self.pid())
    }

    /// A line of `/proc/<pid>/status` in bytes, for example `VmRSS`.
    ///
    /// # Errors
    /// When the process or the line is gone.
    pub fn memory(&self, key: &str) -> io::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.map(|kib| kib * 1024)
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Runs a `ringfence` command against this broker with `input` on its standard input.
    #[must_use]
    pub fn cli(&self, args: &[&str], input: &[u8]) -> CliOutput {
        let address = self.setup.native.to_string();
        let mut all = args.to_vec();
        all.extend(["--bootstrap", &address]);
        cli(&self.setup.program, &all, input)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What a command printed and how it ended.
#[derive(Debug)]
pub struct CliOutput {
    /// Exit status; -1 when a signal ended it.
    pub code: i32,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: String,
}

/// Runs `program` to its end.
///
/// # Panics
/// When it cannot be started.
#[must_use]
pub fn cli(program: &Path, args: &[&str], input: &[u8]) -> CliOutput {
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut stdin = child.stdin.take().expect("standard input is piped");
    let input = input.to_vec();
    let writer = thread::spawn(move || stdin.write_all(&input));
    let output = child
        .wait_with_output()
        .expect("the command's output can be read");
    // A command that does not want its input closes the pipe; its status tells the story.
    let _ = writer.join();
    CliOutput {
        code: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// User and system time of a process so far.
///
/// # Errors
/// When the process is gone.
pub fn cpu_time(pid: u32) -> io::Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Fields after the command name, which may hold blanks: state is the first, utime and stime are 12th and 13th.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    // Linux reports these in units of 1/100 s on every architecture this runs on (USER_HZ).
    Ok(Duration::from_millis(ticks * 10))
}

/// One HTTP GET: status and body.
///
/// # Errors
/// When nobody answers or the answer is not HTTP.
pub fn http_get(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Ok((status.ok_or(io::ErrorKind::InvalidData)?, body.to_string()))
}

/// A temporary folder on the file system of the build, so that direct I/O works where the build's disk has it.
///
/// # Panics
/// When it cannot be made.
#[must_use]
pub fn scratch() -> TempDir {
    let base = target_dir().join("scratch");
    fs::create_dir_all(&base).expect("the build folder is writable");
    tempfile::Builder::new()
        .prefix("t-")
        .tempdir_in(base)
        .expect("the build folder is writable")
}

/// Says what this machine does not let a test check; `scripts/test` lists it at the end.
pub fn skip(test: &str, reason: &str) {
    eprintln!("skipped {test}: {reason}");
    let Some(path) = std::env::var_os("RINGFENCE_SKIPS") else {
        return;
    };
    let file = File::options().append(true).create(true).open(path);
    let written = file.and_then(|mut file| file.write_all(format!("{test}: {reason}\n").as_bytes()));
    written.expect("the list of skipped tests is writable");
}

/// Whether the test runs as root (mounts, other users).
#[must_use]
pub fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uid = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    uid.and_then(|ids| ids.split_whitespace().nth(1)) == Some("0")
}

/// The folder of the build that this test belongs to: `target/<profile>`.
#[must_use]
pub fn target_dir() -> PathBuf {
    let mut dir = std::env::current_exe().expect("a running program has a path");
    dir.pop();
    if dir.ends_with("deps") {
        dir.pop();
    }
    dir
}

/// The `ringfence` program of this build, built first when it is missing or stale.
///
/// # Panics
/// When it does not build.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let dir = target_dir();
        let profile = if dir.ends_with("release") {
            "release"
        } else {
            "dev"
        };
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
        let built = Command::new(env!("CARGO"))
            .args([
                "build",
                "--quiet",
                "--locked",
                "--bin",
                "ringfence",
                "--profile",
                profile,
            ])
            .arg("--manifest-path")
            .arg(manifest)
            .output()
            .expect("cargo runs");
        assert!(
            built.status.success(),
            "ringfence does not build: {}",
            String::from_utf8_lossy(&built.stderr)
        );
        dir.join("ringfence")
    })
}

/// A loopback address of this process alone: the low 24 bits of its id below 127.0.0.0/8.
fn own_address() -> IpAddr {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(127, a.wrapping_add(1), b, c))
}

/// The first of four ports that no other broker of this process uses.
fn next_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    NEXT.fetch_add(4, Ordering::Relaxed)
}
