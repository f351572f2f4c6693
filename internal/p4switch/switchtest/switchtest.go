// SPDX-License-Identifier: Apache-2.0

// Package switchtest runs a software switch (bmv2's simple_switch_grpc) with the program of folder
// p4, and exchanges frames with it.
package switchtest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/testhost"
)

// The ports of the switch.
const (
	Network = 1 // towards clients and servers
	Host    = 2 // towards the host that controls the switch
)

const (
	program = "simple_switch_grpc"
	// patience is how long a switch may take to start, and a frame to come.
	patience = 20 * time.Second
	// longest is the longest frame on the ports, in bytes.
	longest = 9018
)

// Switch is a running switch with a client that may write.
type Switch struct {
	*p4switch.Client
	To    desired.Switch
	ports map[int]int // the sockets at the other ends of the ports' cables, by port
}

// IsInstalled tells whether the software switch is in PATH.
var IsInstalled = sync.OnceValue(func() bool {
	_, err := exec.LookPath(program)
	return err == nil
})

// Start starts a switch that runs the balancer until the test ends. It skips the test if the software
// switch is not installed.
func Start(t testing.TB) *Switch {
	t.Helper()
	s, address := StartEmpty(t)
	s.To = desired.Switch{Address: address, ElectionID: 1}
	s.Client = dial(t, &s.To)
	t.Cleanup(func() { testhost.Must(t, s.Close()) })
	for _, want := range []bool{true, false} { // the second time, it has the program already
		replaced, err := s.Configure(t.Context())
		testhost.Must(t, err)
		if replaced != want {
			t.Fatalf("the program was replaced: %t, want %t", replaced, want)
		}
	}
	return s
}

// StartEmpty starts a switch without a program and without a client. It returns the switch, and the
// address for P4Runtime.
func StartEmpty(t testing.TB) (_ *Switch, address string) {
	t.Helper()
	testhost.NeedSwitch(t)
	testhost.NeedNamespaces(t)
	ns, err := netdev.NewNamespace()
	testhost.Must(t, err)
	t.Cleanup(func() { testhost.Must(t, ns.Close()) })
	s := &Switch{ports: map[int]int{}}
	testhost.Must(t, ns.Do(s.connect))
	t.Cleanup(s.disconnect)
	address = "unix:" + filepath.Join(t.TempDir(), "p4runtime")
	run(t, ns, address)
	return s, address
}

// connect makes a cable for each port, and opens a socket at its other end.
func (s *Switch) connect() error {
	// The kernel must send no frames of its own.
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0); err != nil {
		return err
	}
	for _, port := range []int{Network, Host} {
		attributes := netlink.NewLinkAttrs()
		attributes.Name, attributes.MTU = fmt.Sprintf("port%d", port), longest-18
		veth := &netlink.Veth{LinkAttrs: attributes, PeerName: fmt.Sprintf("end%d", port)}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		end, err := netlink.LinkByName(veth.PeerName)
		if err != nil {
			return err
		}
		if err := errors.Join(netlink.LinkSetMTU(end, longest-18), netlink.LinkSetUp(veth), netlink.LinkSetUp(end)); err != nil {
			return err
		}
		if s.ports[port], err = openSocket(end.Attrs().Index); err != nil {
			return err
		}
	}
	return nil
}

// openSocket opens a socket that sends frames on an interface, and gets those that arrive there.
func openSocket(ifindex int) (int, error) {
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
	if err != nil {
		return 0, err
	}
	wait := unix.NsecToTimeval(int64(patience))
	err = errors.Join(
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: ifindex}),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
	)
	return fd, err
}

func (s *Switch) disconnect() {
	for _, fd := range s.ports {
		_ = unix.Close(fd)
	}
}

// run runs the process in a network namespace until the test ends. It needs the /sys of this
// namespace, which shows the interfaces.
func run(t testing.TB, ns *netdev.Namespace, address string) {
	t.Helper()
	const script = `mount -t sysfs none /sys && exec "$@"`
	args := []string{"--mount", "--propagation", "private", "sh", "-c", script, "sh", program, "--no-p4"}
	for _, port := range []int{Network, Host} {
		args = append(args, "-i", fmt.Sprintf("%d@port%d", port, port))
	}
	cmd := exec.Command("unshare", append(args, "--", "--grpc-server-addr", address)...)
	output := &tail{}
	cmd.Stdout, cmd.Stderr = output, output
	// The kernel kills the switch if the test's process ends, or the thread that has started it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		ended <- ns.Do(func() error {
			err := cmd.Start()
			started <- err
			return errors.Join(err, cmd.Wait())
		})
	}()
	testhost.Must(t, <-started)
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		err := <-ended
		if t.Failed() {
			t.Logf("%s ended (%v): %s", program, err, output.text)
		}
	})
}

// tail keeps the last output of a process.
type tail struct{ text []byte }

func (o *tail) Write(text []byte) (int, error) {
	o.text = append(o.text, text...)
	o.text = o.text[max(0, len(o.text)-1<<20):]
	return len(text), nil
}

// dial connects with the switch, which may still be starting.
func dial(t testing.TB, to *desired.Switch) *p4switch.Client {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		c, err := p4switch.Dial(context.Background(), to)
		if err == nil {
			return c
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// Send sends a frame into a port.
func (s *Switch) Send(t testing.TB, port int, frame []byte) {
	t.Helper()
	if _, err := unix.Write(s.ports[port], frame); err != nil {
		t.Fatalf("send %d bytes to port %d: %v", len(frame), port, err)
	}
}

// Receive returns the next frame that leaves by a port.
func (s *Switch) Receive(t testing.TB, port int) []byte {
	t.Helper()
	frame, err := receive(s.ports[port])
	if err != nil {
		t.Fatalf("no frame from port %d: %v", port, err)
	}
	return frame
}

// Exchange sends a frame into a port, and returns the only frame that leaves, with its port. No other
// frame may be under way.
func (s *Switch) Exchange(t testing.TB, port int, frame []byte) (by int, out []byte) {
	t.Helper()
	s.Send(t, port, frame)
	waiting := []unix.PollFd{
		{Fd: int32(s.ports[Network]), Events: unix.POLLIN}, {Fd: int32(s.ports[Host]), Events: unix.POLLIN},
	}
	n, err := unix.Poll(waiting, int(patience.Milliseconds()))
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Poll(waiting, int(patience.Milliseconds()))
	}
	switch {
	case err != nil || n != 1:
		t.Fatalf("%d ports have a frame (%v), after this one was sent: %x", n, err, frame)
	case waiting[0].Revents != 0:
		return Network, s.Receive(t, Network)
	}
	return Host, s.Receive(t, Host)
}

// receive returns the next frame of a packet socket.
func receive(fd int) ([]byte, error) {
	frame, control := make([]byte, longest), make([]byte, 64)
	n, length, _, _, err := unix.Recvmsg(fd, frame, control, 0)
	for errors.Is(err, unix.EINTR) {
		n, length, _, _, err = unix.Recvmsg(fd, frame, control, 0)
	}
	if err != nil {
		return nil, err
	}
	tag, err := tagIn(control[:length])
	return slices.Insert(frame[:n], 12, tag...), err
}

// tagIn returns the VLAN tag that the kernel has removed from a frame, if it had one: struct
// tpacket_auxdata of Linux.
func tagIn(control []byte) ([]byte, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	if len(messages) != 1 || len(messages[0].Data) < 20 {
		return nil, fmt.Errorf("a frame without PACKET_AUXDATA: %x", control)
	}
	auxiliary := messages[0].Data
	if binary.NativeEndian.Uint32(auxiliary)&unix.TP_STATUS_VLAN_VALID == 0 {
		return nil, nil
	}
	tag := binary.BigEndian.AppendUint16(nil, binary.NativeEndian.Uint16(auxiliary[18:]))
	return binary.BigEndian.AppendUint16(tag, binary.NativeEndian.Uint16(auxiliary[16:])), nil
}
