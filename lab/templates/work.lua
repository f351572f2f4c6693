-- SPDX-License-Identifier: Apache-2.0

-- Apache runs this script (mod_lua) for requests with the parameter work, such as /?work=190ms.
-- The script uses that much CPU time, and then answers with the server's name.

-- The units of a duration, in seconds. They are those of segue-lab app.
local units = {ns = 1e-9, us = 1e-6, ["µs"] = 1e-6, ms = 1e-3, s = 1, m = 60, h = 3600}
local longest = 3600 -- the longest duration that a request may ask for, in seconds

-- seconds converts a duration such as 190ms or 1m30.5s to seconds. It returns nil if the text is not a
-- duration.
local function seconds(text)
    if text == "0" then
        return 0
    end
    local sum, rest = 0, text
    while rest ~= "" do
        local number, unit, after = rest:match("^([%d.]+)([^%d.]+)(.*)$")
        number = tonumber(number)
        if not number or not units[unit] then
            return nil
        end
        sum, rest = sum + number * units[unit], after
    end
    return text ~= "" and sum or nil
end

-- compute uses CPU time for a duration in seconds, and returns how much it has used. os.clock is the
-- CPU time of this process, and a worker of the MPM prefork is a process with one thread. os.clock is
-- a system call, so the loop calls it only every few microseconds.
local function compute(duration)
    local from = os.clock()
    local sum = 0
    while os.clock() - from < duration do
        for i = 1, 500 do
            sum = sum + i
        end
    end
    return os.clock() - from
end

function handle(r)
    local arrived = r:clock() -- in microseconds
    local text = r:parseargs().work
    local work = seconds(text)
    r.content_type = "text/plain"
    if not work or work > longest then
        r.status = 400
        r:puts(string.format("work %q: must be a duration from 0s to 1h\n", text))
        return apache2.OK
    end
    local service = compute(work)
    r.headers_out["Server-Timing"] = string.format("service;dur=%.3f, sojourn;dur=%.3f",
        service * 1e3, (r:clock() - arrived) / 1e3)
    r:puts("{{.Node}}\n")
    return apache2.OK
end
