// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"fmt"
	"os"
)

// timestampsPath is the file of the setting of TCP timestamps, which is for IPv4 and IPv6. It has
// the setting of the calling thread's network namespace.
const timestampsPath = "/proc/sys/net/ipv4/tcp_timestamps"

// followTimestamps tells the data path whether the host sends TCP timestamps, which carry the
// cookies of services with persistence stateless. It warns if the host sends no timestamps and a
// balancer has asked for cookies: an agent does not know the persistence of a service, so only a
// request for cookies shows that a service needs the timestamps.
func (a *Agent) followTimestamps() error {
	value, err := os.ReadFile(timestampsPath)
	if err != nil {
		return err
	}
	off := bytes.Equal(bytes.TrimSpace(value), []byte("0"))
	if err := a.kernel.setTimestampsOff(off); err != nil {
		return err
	}
	used, err := a.kernel.areCookiesUsed()
	if err != nil {
		return err
	}
	lost := off && used
	switch {
	case lost && !a.cookiesLost:
		a.log.Warn("a balancer asks for cookies, but this host sends no TCP timestamps: it takes few connections, "+
			"and balancers ask several servers for each of their packets", "setting", "net.ipv4.tcp_timestamps=0")
	case !lost && a.cookiesLost:
		a.log.Info("this host sends TCP timestamps again, which carry the cookies")
	}
	a.cookiesLost = lost
	return nil
}

// setTimestampsOff tells the data path whether the host sends no timestamps.
func (k *kernel) setTimestampsOff(off bool) error {
	value := uint32(0)
	if off {
		value = 1
	}
	if err := k.objects.TimestampsAreOff.Set(value); err != nil {
		return fmt.Errorf("note whether the host sends timestamps: %w", err)
	}
	return nil
}

// areCookiesUsed tells whether a balancer has asked for cookies.
func (k *kernel) areCookiesUsed() (bool, error) {
	var used uint32
	if err := k.objects.CookiesUsed.Lookup(uint32(0), &used); err != nil {
		return false, fmt.Errorf("find out whether cookies are used: %w", err)
	}
	return used != 0, nil
}
