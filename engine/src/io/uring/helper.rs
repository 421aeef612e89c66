//! The helper thread: the few disk calls the ring has no operation for.
//!
//! It starts with the first job and ends when the [`Helper`] is dropped. Answers wait in a list; an eventfd, read
//! through the ring, says that there are some.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::disk::disk_error;
use super::ring::last_errno;
use super::slab::Key;
use crate::io::{DirEntry, DiskError, Done};

/// A blocking call.
pub(super) enum Work {
    /// syncfs of the file system that holds the descriptor.
    SyncFs(Arc<OwnedFd>),
    /// ftruncate.
    Truncate(OwnedFd, u64),
    /// The names of a directory below the descriptor.
    List(Arc<OwnedFd>, CString),
}

type Answer = (Key, Result<Done, DiskError>);

struct Shared {
    answers: Mutex<Vec<Answer>>,
    bell: File,
}

/// The running thread, and the way to it.
struct Worker {
    jobs: Sender<(Key, Work)>,
    thread: JoinHandle<()>,
}

/// Owner of the thread.
pub(super) struct Helper {
    shared: Arc<Shared>,
    worker: Option<Worker>,
}

/// A new eventfd; blocking, because the ring does not wait on non-blocking files.
pub(crate) fn eventfd() -> Result<OwnedFd, i32> {
    // SAFETY: the call touches no memory, and a result that is not negative is a descriptor of our own.
    unsafe {
        match libc::eventfd(0, libc::EFD_CLOEXEC) {
            fd if fd >= 0 => Ok(OwnedFd::from_raw_fd(fd)),
            _ => Err(last_errno()),
        }
    }
}

impl Helper {
    pub(super) fn new() -> Result<Helper, i32> {
        Ok(Helper {
            shared: Arc::new(Shared {
                answers: Mutex::new(Vec::new()),
                bell: File::from(eventfd()?),
            }),
            worker: None,
        })
    }

    /// Descriptor to read eight bytes from: done when there are answers.
    pub(super) fn bell(&self) -> i32 {
        self.shared.bell.as_raw_fd()
    }

    /// Answers so far, each exactly once.
    pub(super) fn answers(&self) -> Vec<Answer> {
        std::mem::take(&mut *self.shared.answers.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Queues `work`; `Err` when there is no thread to do it.
    pub(super) fn run(&mut self, key: Key, work: Work) -> Result<(), DiskError> {
        let worker = match &mut self.worker {
            Some(worker) => worker,
            empty => empty.insert(start(Arc::clone(&self.shared))?),
        };
        worker
            .jobs
            .send((key, work))
            .map_err(|_| DiskError::Io(libc::EIO))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.take() {
            drop(worker.jobs);
            if worker.thread.join().is_err() {
                tracing::error!("the disk helper thread had panicked");
            }
        }
    }
}

fn start(shared: Arc<Shared>) -> Result<Worker, DiskError> {
    let (jobs, queue) = channel::<(Key, Work)>();
    let thread = std::thread::Builder::new()
        .name("disk-helper".to_owned())
        .spawn(move || {
            for (key, work) in queue {
                let answer = execute(work);
                shared
                    .answers
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push((key, answer));
                if let Err(error) = (&shared.bell).write_all(&1u64.to_ne_bytes()) {
                    tracing::error!(%error, "the disk helper could not report an answer");
                }
            }
        })
        .map_err(|error| disk_error(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(Worker { jobs, thread })
}

fn execute(work: Work) -> Result<Done, DiskError> {
    match work {
        Work::SyncFs(fd) => {
            // SAFETY: a call on a descriptor we own; it touches no memory.
            let result = unsafe { libc::syncfs(fd.as_raw_fd()) };
            if result < 0 {
                return Err(disk_error(last_errno()));
            }
            Ok(Done::Ok)
        }
        Work::Truncate(fd, len) => File::from(fd)
            .set_len(len)
            .map(|()| Done::Ok)
            .map_err(|error| disk_error(error.raw_os_error().unwrap_or(libc::EIO))),
        Work::List(root, path) => list(&root, &path).map(Done::Listed).map_err(disk_error),
    }
}

/// An open directory stream.
struct Stream(*mut libc::DIR);

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: opened by fdopendir and closed once.
        unsafe { libc::closedir(self.0) };
    }
}

fn list(root: &OwnedFd, path: &CStr) -> Result<Vec<DirEntry>, i32> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: the path is NUL-terminated and lives across the call.
    let fd = unsafe { libc::openat(root.as_raw_fd(), path.as_ptr(), flags) };
    if fd < 0 {
        return Err(last_errno());
    }
    // SAFETY: `fd` is an open directory of our own; on success the stream owns it.
    let stream = unsafe { libc::fdopendir(fd) };
    if stream.is_null() {
        let errno = last_errno();
        // SAFETY: fdopendir failed, so `fd` is still ours alone.
        unsafe { libc::close(fd) };
        return Err(errno);
    }
    let stream = Stream(stream);
    let mut entries = Vec::new();
    while let Some(name) = next_name(&stream)? {
        if name.as_c_str() == c"." || name.as_c_str() == c".." {
            continue;
        }
        if let Some((is_dir, len)) = stat(fd, &name)? {
            entries.push(DirEntry {
                name: name.to_string_lossy().into_owned(),
                is_dir,
                len: if is_dir { 0 } else { len },
            });
        }
    }
    entries.sort_unstable();
    Ok(entries)
}

fn next_name(stream: &Stream) -> Result<Option<CString>, i32> {
    // SAFETY: errno is thread-local; readdir needs it cleared to tell the end from an error. The stream is open, and
    // the entry is copied before the next call may overwrite it.
    unsafe {
        *libc::__errno_location() = 0;
        let entry = libc::readdir(stream.0);
        if entry.is_null() {
            return match last_errno() {
                0 => Ok(None),
                errno => Err(errno),
            };
        }
        Ok(Some(CStr::from_ptr((*entry).d_name.as_ptr()).to_owned()))
    }
}

/// Kind and length of a name; `None` when it was removed meanwhile.
fn stat(dir: i32, name: &CStr) -> Result<Option<(bool, u64)>, i32> {
    // SAFETY: all-zero is a valid `stat`; the name is NUL-terminated and both live across the call.
    let (result, stat) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let result = libc::fstatat(dir, name.as_ptr(), &raw mut stat, libc::AT_SYMLINK_NOFOLLOW);
        (result, stat)
    };
    if result < 0 {
        return match last_errno() {
            libc::ENOENT => Ok(None),
            errno => Err(errno),
        };
    }
    let is_dir = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
    Ok(Some((is_dir, u64::try_from(stat.st_size).unwrap_or(0))))
}

/// A second descriptor of the same open file.
pub(super) fn duplicate(fd: &Rc<OwnedFd>) -> Result<OwnedFd, DiskError> {
    fd.try_clone()
        .map_err(|error| disk_error(error.raw_os_error().unwrap_or(libc::EIO)))
}
