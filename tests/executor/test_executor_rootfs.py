"""The root file system made from an image: many layers, awkward paths, the image's own words (cases C57, C44, C48)."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import build
import pytest
from jobs import run, sh
from small_images import image

from forgeyard_executor import ExecutorError, InvalidRequest, Job, Outcome, Profile, SourceMode, Step

pytestmark = pytest.mark.kernel


def one_file_layers(count: int) -> list[bytes]:
    """Layers that each add a file of their own, and replace one that all of them have."""
    return [
        build.tar([build.Entry(f"layers/{number}", b"x"), build.Entry("top", f"{number}\n".encode())])
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [38, 64, 127, 128, 200, 500])
def test_many_layers_run(shared_state: Path, tmp_path: Path, count: int) -> None:
    """Every layer is there, and the topmost wins; the kernel's own limit is the only one."""
    job = Job(
        image=image(tmp_path / "i", layers=one_file_layers(count - 1)), steps=(sh("ls /layers | wc -l; cat /top"),)
    )
    result, out, err = run(shared_state, job)
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    assert out.decode().split() == [str(count - 1), str(count - 2)]


def test_more_layers_than_the_kernel_takes_are_refused(shared_state: Path, tmp_path: Path) -> None:
    """A typed error before anything is unpacked, never layers silently left out."""
    job = Job(image=image(tmp_path / "i", layers=one_file_layers(500)), steps=(Step("true"),))
    with pytest.raises(ExecutorError, match="501 layers") as caught:
        run(shared_state, job)
    assert caught.value.reason == "too_many_layers"


@pytest.fixture(params=["long", "separators"])
def awkward_state(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A state directory, and with it the store of layers, whose path would break an option string."""
    top = Path(tempfile.mkdtemp(prefix="fy-", dir="/var/tmp"))
    top.chmod(0o711)
    names = {"long": ["long" * 50] * 8, "separators": ["a:b", "c,d", "e\\f", "with space", "upperdir=x,lowerdir=y:z"]}
    path = top
    for name in names[request.param]:
        path = path / name
        path.mkdir(mode=0o711)
        path.chmod(0o711)
    yield path
    for thread in threading.enumerate():
        if thread.name == "image-sync":  # marks layers that reached the disk, also after the executor was closed
            thread.join()
    shutil.rmtree(top)


def test_awkward_store_paths(awkward_state: Path, tmp_path: Path) -> None:
    """No option string holds a path, so none is cut or split (case C57)."""
    (tmp_path / "a:b,c").mkdir()
    job = Job(
        image=image(tmp_path / "i", layers=one_file_layers(150)),
        steps=(sh("ls /layers | wc -l; echo x > /new; cat /top"),),
    )
    result, out, err = run(awkward_state, job)
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    assert out.decode().split() == ["150", "149"]


@pytest.mark.parametrize(
    ("image_user", "ids"),
    [
        ("", "0 0 root"),
        ("0", "0 0 root"),
        ("1000", "1000 1000 app 2000"),
        ("1000:0", "1000 0 app"),
        ("app", "1000 1000 app 2000"),
        ("app:extra", "1000 2000 app"),
        ("8001", "8001 0 8001"),
    ],
)
def test_the_images_user(shared_state: Path, tmp_path: Path, image_user: str, ids: str) -> None:
    """Looked up in the image's own files, with the groups it is in; HOME is a directory it can write to (case C44)."""
    script = 'touch "$HOME/x"; echo $(id -u) $(id -g) $USER $(id -G | tr " " "\\n" | grep -v "^$(id -g)$")'
    result, out, err = run(shared_state, Job(image=image(tmp_path / "i", {"User": image_user}), steps=(sh(script),)))
    assert (result.outcome, out.decode().split()) == (Outcome.SUCCEEDED, ids.split()), err


@pytest.mark.parametrize("image_user", ["nosuch", "1000:nosuch", "-1", "4294967296", "app:", ":app", "a:b:c"])
def test_an_unknown_user_is_refused(shared_state: Path, tmp_path: Path, image_user: str) -> None:
    """By the image's field and its value, before anything is started; never root in its place."""
    with pytest.raises(InvalidRequest, match="image USER") as caught:
        run(shared_state, Job(image=image(tmp_path / "i", {"User": image_user}), steps=(Step("true"),)))
    assert repr(image_user) in str(caught.value)


def test_the_requests_user_beats_the_images(shared_state: Path, tmp_path: Path) -> None:
    """Even one that could not be used."""
    job = Job(image=image(tmp_path / "i", {"User": "nosuch"}), steps=(sh("id -u"),), user="app")
    result, out, err = run(shared_state, job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"1000\n"), err


@pytest.mark.parametrize("mode", [SourceMode.COW, SourceMode.RW])
@pytest.mark.parametrize("user", ["8001", "app", "0"])
def test_the_workspace_is_the_jobs_whoever_it_is(
    shared_state: Path, tmp_path: Path, tree: Path, mode: SourceMode, user: str
) -> None:
    """An image's own uid writes the source, the build directory and the output; the owner on disk stays (C48)."""
    script = "stat -c %u f; echo new > f; mkdir d; echo x > d/x; echo b > /work/build/b; echo o > /work/output/o; id -u"
    job = Job(
        image=image(tmp_path / "i", {"User": user}), steps=(sh(script),), source_mode=mode, profile=Profile.DEVELOPMENT
    )
    result, out, err = run(shared_state, job, source=tree, output=tmp_path / "out")
    assert result.outcome is Outcome.SUCCEEDED, err
    assert len(set(out.split())) == 1
    assert (tmp_path / "out/o").read_text() == "o\n"
    written = mode is SourceMode.RW
    assert (tree / "f").read_text() == ("new\n" if written else "original\n")
    assert (tree / "f").stat().st_uid == 4242
    assert (tree / "d").exists() == written
    if written:
        assert {(tree / name).stat().st_uid for name in ("d", "d/x")} == {4242}


def test_a_workspace_that_root_left_is_the_next_jobs(shared_state: Path, tmp_path: Path, tree: Path) -> None:
    """0700 files of a job as root are the source's owner's on disk, so the next user's job owns them in turn (C48)."""
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "f").write_text("a file of the host\n")
    first = sh(
        "umask 077; mkdir left; echo x > left/f; chmod 0400 left/f; chmod 0500 left; "
        f"ln -s / left-link; ln -s {canary} out"
    )
    second = sh("cat left/f; chmod -R u+w left; rm -r left left-link out; ls")
    for user, step in (("0", first), ("8001", second)):
        job = Job(
            image=image(tmp_path / user, {"User": user}),
            steps=(step,),
            source_mode=SourceMode.RW,
            profile=Profile.DEVELOPMENT,
        )
        result, out, err = run(shared_state, job, source=tree)
        assert result.outcome is Outcome.SUCCEEDED, err
    assert out == b"x\nf\n"
    assert (canary / "f").read_text() == "a file of the host\n"
    assert not list((shared_state / "sandboxes").iterdir())


def test_a_wrong_architecture_is_refused_before_anything_starts(shared_state: Path, tmp_path: Path) -> None:
    """By name, both the image's and the host's."""
    with pytest.raises(ExecutorError, match="image is s390x, host is") as caught:
        run(shared_state, Job(image=image(tmp_path / "i", architecture="s390x"), steps=(Step("true"),)))
    assert caught.value.reason == "wrong_architecture"
    assert not list((shared_state / "sandboxes").iterdir())


@pytest.mark.parametrize("config", [{"Env": ["NOVALUE"]}, {"Volumes": {"x": {}}}, {"ExposedPorts": {"1-9": {}}}])
def test_a_bad_entry_of_the_config_is_named(shared_state: Path, tmp_path: Path, config: dict[str, object]) -> None:
    """The image's field is in the message, and nothing is started."""
    with pytest.raises(ExecutorError, match=f"image config: {next(iter(config))}") as caught:
        run(shared_state, Job(image=image(tmp_path / "i", config), steps=(Step("true"),)))
    assert caught.value.reason == "bad_config"
