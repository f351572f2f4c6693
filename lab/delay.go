// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/daemon"
)

const (
	// delayName is the TAP interface on the fabric for packets that are kept back, so that later
	// packets overtake them.
	delayName = "delay"
	// delayTime is how long the process delay keeps a packet back. It is long enough for a busy
	// flow to send many packets in this time, and short compared to the timeouts of transport
	// protocols.
	delayTime = 2 * time.Millisecond
	// returnTimeout is how long endImpairment waits for the next packet that the process sends
	// back. After that time, the packets that are still missing count as lost.
	returnTimeout = time.Second
	// delayQueue is how many packets may wait in the interface while the process does not run.
	delayQueue = 100_000
)

// Delay makes a TAP interface, and sends each frame that it receives back after delayTime. It sends
// a notification when it is ready, as sd_notify(3) describes. It returns nil when the context ends,
// and an error if reading or writing fails before. When it returns, frames that it has received and
// not sent back may be lost.
func Delay(ctx context.Context, name string) error {
	tap, err := openTAP(name)
	if err != nil {
		return fmt.Errorf("delay: interface %s: %w", name, err)
	}
	defer tap.Close()
	if err := daemon.Notify("READY=1"); err != nil {
		return err
	}
	frames := make(chan frame, 1024) // further frames wait in the interface's queue
	group, groupCtx := errgroup.WithContext(ctx)
	// The read deadline ends the read in receive.
	stop := context.AfterFunc(groupCtx, func() { tap.SetReadDeadline(time.Now()) })
	defer stop()
	group.Go(func() error {
		defer close(frames)
		return receive(groupCtx, tap, frames)
	})
	group.Go(func() error { return sendBack(tap, frames) })
	if err := group.Wait(); ctx.Err() == nil {
		return fmt.Errorf("delay: interface %s: %w", name, err)
	}
	return nil
}

// frame is a received frame, and the time at which it is to be sent back.
type frame struct {
	due  time.Time
	data []byte
}

// receive puts frames from the interface into the channel, until the context ends.
func receive(ctx context.Context, tap *os.File, frames chan<- frame) error {
	buf := make([]byte, maxPacket)
	for {
		n, err := tap.Read(buf)
		if err != nil {
			return err
		}
		select {
		case frames <- frame{time.Now().Add(delayTime), bytes.Clone(buf[:n])}:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// sendBack writes each frame when it is due.
func sendBack(tap *os.File, frames <-chan frame) error {
	for f := range frames {
		time.Sleep(time.Until(f.due))
		if _, err := tap.Write(f.data); err != nil {
			return err
		}
	}
	return nil
}

// openTAP makes a TAP interface, which exists while the file is open. The interface has no
// offloads, so the kernel segments packets and completes their checksums before it passes them to a
// reader.
func openTAP(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	// os.NewFile must come after TUNSETIFF: before, the descriptor cannot be polled.
	tap := os.NewFile(uintptr(fd), "TAP interface "+name)
	if err == nil {
		err = bringUp(name)
	}
	if err != nil {
		return nil, errors.Join(err, tap.Close())
	}
	return tap, nil
}

// bringUp sets the length of an interface's queue to delayQueue, and sets the interface up.
func bringUp(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetTxQLen(link, delayQueue), netlink.LinkSetUp(link))
}
