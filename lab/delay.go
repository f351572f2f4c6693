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
	// delayName is the TAP interface for packets that other packets are to overtake.
	delayName = "delay"
	// delayTime is how long these packets are kept back. A busy flow sends many packets in this
	// time. It is short compared to the timeouts of transport protocols.
	delayTime = 2 * time.Millisecond
	// returnTimeout is how long the process may pause before its packets count as lost.
	returnTimeout = time.Second
	// delayQueue is how many packets may wait while the process does not run.
	delayQueue = 100_000
)

// Delay makes a TAP interface and sends each received frame back after 2 ms. It notifies when it is
// ready, as sd_notify(3) describes. It returns when the context ends; frames that it still has are
// lost.
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

// frame is a frame and the time at which it is sent back.
type frame struct {
	due  time.Time
	data []byte
}

// receive reads frames until the context ends. The end of the context sets the read deadline.
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

// openTAP makes a TAP interface, which exists while the file is open. It has no offloads, so the
// kernel segments packets and computes their checksums before they are read.
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
	tap := os.NewFile(uintptr(fd), "TAP interface "+name) // pollable only once it is an interface
	if err == nil {
		err = bringUp(name)
	}
	if err != nil {
		return nil, errors.Join(err, tap.Close())
	}
	return tap, nil
}

func bringUp(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetTxQLen(link, delayQueue), netlink.LinkSetUp(link))
}
